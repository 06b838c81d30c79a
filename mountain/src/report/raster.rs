// SPDX-License-Identifier: GPL-2.0-or-later
//! SVG to PNG.

use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};
use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{fontdb, Options, Tree};

/// Pixels of the picture for each of the plot's: sharp on dense screens and on paper.
const SCALE: f32 = 2.0;

/// The font comes with the program: servers often have none, and a plot looks the same everywhere.
fn fonts() -> Arc<fontdb::Database> {
    static FONTS: OnceLock<Arc<fontdb::Database>> = OnceLock::new();
    let load = || {
        let mut fonts = fontdb::Database::new();
        fonts.load_font_data(epaint_default_fonts::UBUNTU_LIGHT.to_vec());
        let family = fonts.faces().next().map(|f| f.families[0].0.clone());
        fonts.set_sans_serif_family(family.unwrap_or_default());
        Arc::new(fonts)
    };
    FONTS.get_or_init(load).clone()
}

/// The picture of a plot ([`super::page::standalone`]), twice as large.
pub fn png(svg: &str) -> Result<Vec<u8>> {
    let options = Options {
        fontdb: fonts(),
        ..Options::default()
    };
    let tree = Tree::from_str(svg, &options).context("cannot read the plot's SVG")?;
    let size = tree.size().to_int_size();
    let size = size.scale_by(SCALE).context("the plot is empty")?;
    let mut picture = Pixmap::new(size.width(), size.height()).context("the plot is too large")?;
    let scale = Transform::from_scale(SCALE, SCALE);
    resvg::render(&tree, scale, &mut picture.as_mut());
    picture.encode_png().context("cannot write the plot's PNG")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::plots::{self, Format, Line, Share, SERIES};

    fn dark_pixels(svg: &str) -> usize {
        let picture = Pixmap::decode_png(&png(svg).unwrap()).unwrap();
        picture.pixels().iter().filter(|p| p.green() < 120).count()
    }

    #[test]
    fn a_plot_becomes_a_picture_with_text() {
        let line = Line {
            colour: SERIES[1],
            points: vec![(1.0, 0.0), (2.0, 1.0)],
        };
        let svg = plots::distribution(
            &[line],
            Share::Below,
            1.0..2.0,
            "probes",
            Format::NARROW,
            "label",
        );
        let svg = super::super::page::standalone(&svg.unwrap());
        let picture = Pixmap::decode_png(&png(&svg).unwrap()).unwrap();
        assert_eq!((picture.width(), picture.height()), (800, 680));
        let corner = picture.pixel(0, 0).unwrap();
        assert_eq!((corner.red(), corner.alpha()), (255, 255), "white ground");
        // The texts taken out, less is drawn.
        let mut bare = svg.clone();
        while let (Some(from), Some(to)) = (bare.find("<text"), bare.find("</text>")) {
            bare.replace_range(from..to + 7, "");
        }
        let text = dark_pixels(&svg) as i64 - dark_pixels(&bare) as i64;
        assert!(text > 1_000, "{text} pixels of text");
        assert!(png("no picture").is_err());
    }
}
