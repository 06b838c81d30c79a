// SPDX-License-Identifier: GPL-2.0-or-later
//! Pages of HTML that stand alone.

/// A section of a page, by its id.
///
/// # Panics
/// When the page has none.
pub fn section<'a>(html: &'a str, id: &str) -> &'a str {
    let from = html
        .find(&format!("<section id=\"{id}\">"))
        .unwrap_or_else(|| panic!("no section {id}"));
    &html[from..from + html[from..].find("</section>").unwrap()]
}

/// Asserts that a page loads nothing, runs nothing and is complete.
///
/// # Panics
/// When it does.
#[track_caller]
pub fn stands_alone(html: &str) {
    assert!(!html.contains("://") && !html.contains("<script"));
    assert!(!html.contains("@import") && !html.contains("url("));
    assert!(!html.contains("{{"), "a place was not filled");
    assert!(html.len() < 2_000_000, "{} bytes", html.len());
}
