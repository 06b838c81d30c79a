// SPDX-License-Identifier: GPL-2.0-or-later
//! What `status` and `explain` print.

use super::*;

#[test]
fn an_outcome_without_probes_is_not_called_unanswered() {
    let text = outcome_text(Some(&Outcome::default()));
    assert!(text.starts_with("undecided: there was nothing"), "{text}");
    let unanswered = Outcome {
        others_p95_us: Some(20e3),
        ..Outcome::default()
    };
    let text = outcome_text(Some(&unanswered));
    assert_eq!(
        text,
        "undecided: p95 after it unanswered, of the others 20.0 ms"
    );
}
