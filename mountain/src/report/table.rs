// SPDX-License-Identifier: GPL-2.0-or-later
//! Tables of text: every column is as wide as its widest cell.

use std::fmt::{Display, Write as _};

/// Between two columns.
const GAP: &str = "  ";

/// Which columns hold words, which start at the left. Figures end at the right.
#[derive(Clone, Copy, Debug)]
pub enum Words<'a> {
    /// All columns.
    All,
    /// These columns, counted from 0.
    In(&'a [usize]),
}

impl Words<'_> {
    fn has(self, column: usize) -> bool {
        match self {
            Words::All => true,
            Words::In(columns) => columns.contains(&column),
        }
    }
}

/// The head of a table, from its titles with `|` between them.
pub fn head(titles: &str) -> Vec<String> {
    titles.split('|').map(str::to_owned).collect()
}

/// The cells of a row.
pub fn row<const N: usize>(cells: [&dyn Display; N]) -> Vec<String> {
    cells.map(ToString::to_string).to_vec()
}

/// Lays rows out in columns, a line a row. A row may have fewer cells than others.
pub fn align(rows: &[Vec<String>], words: Words) -> String {
    let width = |cell: &String| cell.chars().count();
    let mut widths: Vec<usize> = Vec::new();
    for row in rows {
        widths.resize(widths.len().max(row.len()), 0);
        for (widest, cell) in widths.iter_mut().zip(row) {
            *widest = width(cell).max(*widest);
        }
    }
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let gap = if column == 0 { "" } else { GAP };
            let _ = match words.has(column) {
                true => write!(line, "{gap}{cell:<width$}"),
                false => write!(line, "{gap}{cell:>width$}"),
            };
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_start_at_the_left_and_figures_end_at_the_right() {
        let rows = [row([&"", &"ms", &"why"]), row([&"größer", &12.5, &"late"])];
        let mixed = align(&rows, Words::In(&[0, 2]));
        assert_eq!(mixed, "          ms  why\ngrößer  12.5  late\n");
        let words = align(&rows, Words::All);
        assert_eq!(words, "        ms    why\ngrößer  12.5  late\n");
    }

    #[test]
    fn a_short_row_ends_early() {
        let rows = [row([&"a", &"b"]), row([&"longer"])];
        assert_eq!(align(&rows, Words::All), "a       b\nlonger\n");
        assert_eq!(align(&[], Words::All), "");
    }
}
