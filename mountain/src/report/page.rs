// SPDX-License-Identifier: GPL-2.0-or-later
//! What the pages of reports have in common: colours, style sheet, and the filling of templates.

use std::fmt::Write as _;

use anyhow::Result;

use super::plots::{self, hex, Format, RGBColor};
use crate::host::stdout::plain;

/// What an SVG needs in a file of its own, but not inside of HTML.
pub(super) const NAMESPACE: &str = " xmlns=\"http://www.w3.org/2000/svg\"";

/// The values of a colour on light and on dark ground.
type Values = (&'static str, &'static str);

const SHADES: [Values; plots::SHADES.len()] = [
    ("#f6e3d3", "#44301f"),
    ("#dde6f6", "#233450"),
    ("#e6f0dc", "#2b3b1f"),
];
const PARTS: [Values; plots::PARTS.len()] = [
    ("#a8662a", "#d9a06a"),
    ("#3f74b5", "#7ba9e6"),
    ("#5f8f2e", "#9cc56a"),
    ("#a06fb0", "#bd8ccd"),
    ("#8d8d8d", "#a8a8a8"),
    ("#4aa3a3", "#63c4c4"),
];
const SERIES: [Values; plots::SERIES.len()] = [
    ("#d55e00", "#ff8a3d"),
    ("#0068a8", "#56b4f5"),
    ("#6b7680", "#98a4af"),
    ("#00855f", "#2fce9d"),
    ("#b0528c", "#ea8fc4"),
    ("#a07d00", "#e6c14a"),
    ("#5b4bb5", "#a99bff"),
];

/// Each colour name of the plots with its values. Series and parts are told apart by people with any
/// colour vision (after Okabe and Ito).
fn palette() -> impl Iterator<Item = (RGBColor, Values)> {
    let single = [
        (plots::INK, ("#1d2329", "#e4e8ec")),
        (plots::GRID, ("#e6eaed", "#2a3138")),
        (plots::LOST, ("#b3261e", "#ff6b5e")),
    ];
    (single.into_iter())
        .chain(plots::SHADES.into_iter().zip(SHADES))
        .chain(plots::PARTS.into_iter().zip(PARTS))
        .chain(plots::SERIES.into_iter().zip(SERIES))
}

/// The style sheet of a page: follows the reader's light or dark setting, and paper is light.
pub fn styles() -> String {
    let (mut light, mut dark, mut rules) = (String::new(), String::new(), String::new());
    for (colour, (on_light, on_dark)) in palette() {
        let name = hex(colour);
        let variable = format!("--c{}", &name[1..]);
        let _ = write!(light, "{variable}: {on_light}; ");
        let _ = write!(dark, "{variable}: {on_dark}; ");
        let _ = writeln!(
            rules,
            "svg [fill=\"{name}\"] {{ fill: var({variable}); }} \
             svg [stroke=\"{name}\"] {{ stroke: var({variable}); }}"
        );
    }
    format!(
        ":root {{ color-scheme: light dark; --page: #ffffff; --ink: #1d2329; --soft: #5c6670; \
         --rule: #d9dee3; --good: #17713f; --bad: #b3261e; {light} }}\n\
         @media (prefers-color-scheme: dark) {{ :root {{ --page: #14181c; --ink: #e4e8ec; \
         --soft: #9aa5b0; --rule: #343c44; --good: #5cc88a; --bad: #ff8a80; {dark} }} }}\n\
         @media print {{ :root {{ color-scheme: light; --page: #fff; --ink: #000; --soft: #444; \
         --rule: #d9dee3; --good: #17713f; --bad: #b3261e; {light} }} }}\n{}{rules}",
        include_str!("style.css")
    )
}

/// A plot as a file of its own, in the light colours on white ground.
pub fn standalone(svg: &str) -> String {
    let mut svg = svg.replacen("<svg ", &format!("<svg{NAMESPACE} "), 1);
    for (colour, (on_light, _)) in palette() {
        svg = svg.replace(&hex(colour), on_light);
    }
    let ground = "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>";
    let inside = svg.find('>').map_or(0, |end| end + 1);
    svg.insert_str(inside, ground);
    svg
}

/// The figure of a plot: drawn for a screen or paper, and again for a phone.
pub fn figure(draw: impl Fn(Format) -> Result<String>) -> Result<String> {
    Ok(format!(
        "<figure><div class=\"wide\">{}</div><div class=\"narrow\">{}</div></figure>",
        draw(Format::WIDE)?,
        draw(Format::NARROW)?
    ))
}

/// Replaces each `{{name}}`; what was filled in is not looked at again.
pub fn fill(template: &str, parts: &[(&str, String)]) -> String {
    let mut pieces = template.split("{{");
    let mut out = pieces.next().unwrap_or("").to_owned();
    for piece in pieces {
        let (name, rest) = piece.split_once("}}").unwrap_or(("", piece));
        if let Some((_, value)) = parts.iter().find(|(n, _)| *n == name) {
            out.push_str(value);
        }
        out.push_str(rest);
    }
    out
}

/// Text for HTML content and attributes.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in plain(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}

/// Names with the colours of the page's plots.
pub fn legend(entries: impl Iterator<Item = (String, RGBColor)>) -> String {
    let mut out = String::from("<ul class=\"legend\">");
    for (name, colour) in entries {
        let variable = &hex(colour)[1..];
        let _ = write!(
            out,
            "<li><i style=\"background: var(--c{variable})\"></i>{}</li>",
            escape(&name)
        );
    }
    out.push_str("</ul>");
    out
}

/// The head of a table with a column for each name, which is HTML, and one for the names of rows.
pub fn table_head(names: impl Iterator<Item = String>) -> String {
    let mut out = String::from("<table><thead><tr><th></th>");
    for name in names {
        let _ = write!(out, "<th scope=\"col\">{name}</th>");
    }
    out + "</tr></thead><tbody>"
}

/// A line of a table; `cells` are HTML.
pub fn table_row(attributes: &str, name: &str, cells: impl Iterator<Item = String>) -> String {
    let (name, cells) = (escape(name), cells.collect::<String>());
    format!("<tr{attributes}><th scope=\"row\">{name}</th>{cells}</tr>")
}

/// A long value folded up, and cut where `file` is the better place to read it.
pub fn shortened(value: &str, file: &str) -> String {
    const FOLD: usize = 200;
    const CUT: usize = 4_000;
    if value.chars().count() <= FOLD {
        return escape(value);
    }
    let start: String = value.chars().take(80).collect();
    let body: String = value.chars().take(CUT).collect();
    let more = if body.len() < value.len() {
        format!(" … (all of it in {})", escape(file))
    } else {
        String::new()
    };
    format!(
        "<details><summary>{} …</summary>{}{more}</details>",
        escape(&start),
        escape(&body)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filled_text_is_not_filled_again() {
        let parts = [("a", "{{b}}".to_owned()), ("b", "no".to_owned())];
        assert_eq!(fill("<{{a}}|{{b}}|{{unknown}}>", &parts), "<{{b}}|no|>");
    }

    #[test]
    fn long_values_are_folded_and_cut() {
        assert_eq!(shortened("<20>", "f"), "&lt;20&gt;");
        let folded = shortened(&"ä".repeat(300), "run.json");
        assert!(folded.starts_with("<details>") && !folded.contains("run.json"));
        let cut = shortened(&"ä".repeat(100_000), "run.json");
        assert!(cut.contains("run.json") && cut.len() < 10_000);
    }

    #[test]
    fn markup_is_escaped() {
        assert_eq!(escape("<b a=\"1\">&"), "&lt;b a=&quot;1&quot;&gt;&amp;");
    }

    #[test]
    fn a_file_of_its_own_has_real_colours() {
        let name = hex(plots::LOST);
        let svg = standalone(&format!("<svg width=\"9\"><g fill=\"{name}\"/></svg>"));
        assert!(svg.starts_with("<svg xmlns=") && svg.contains("><rect width=\"100%\""));
        assert!(svg.contains("#b3261e") && !svg.contains(&name), "{svg}");
    }
}
