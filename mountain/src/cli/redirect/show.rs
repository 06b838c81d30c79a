// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain redirect list` and `stats`: the rules in force, and what they carry.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use anyhow::Result;
use serde_json::json;

use crate::cli::{print_json, show_for_a_second};
use crate::redirect::actions;
use crate::redirect::bpf::fast::Carried;
use crate::redirect::{Backend, CountedRule, Installed, ListedRule, Stats, Traffic};
use crate::report::table::{align, head, row, Words};

pub(super) const NONE: &str = "there is no redirect in this network namespace\n";

pub(super) fn stats(watch: bool, json: bool) -> Result<()> {
    let mut before: Option<(Instant, Vec<Stats>)> = None;
    loop {
        // Other commands can come between: nothing is locked while this sleeps.
        let rules = actions::open(false)?.all()?;
        let stats = actions::stats(&rules)?;
        let gone = actions::gone(&rules)?;
        let now = Instant::now();
        if json {
            let counted = |(installed, stats): (Installed, Stats)| CountedRule {
                stats,
                active: !gone.contains(&installed.id),
                rule: installed.rule,
                backend: installed.plan.backend,
            };
            let rules: Vec<CountedRule> = rules.into_iter().zip(stats).map(counted).collect();
            return print_json(&json!({ "rules": rules }));
        }
        let since = before
            .as_ref()
            .map(|(then, stats)| ((now - *then).as_secs_f64(), stats.as_slice()));
        let text = stats_text(&rules, &stats, &gone, since);
        if !watch {
            print!("{text}");
            return Ok(());
        }
        before = Some((now, stats));
        show_for_a_second(&text);
    }
}

const NOT_IN_FORCE: &str = "NOT IN FORCE";
const BRING_BACK: &str = "\nSomething has removed them, or their devices went: `mountain redirect restore` brings back what can be.\n";

/// `gone`: the rules that are not in force. `since`: seconds and statistics of the time before.
fn stats_text(
    rules: &[Installed],
    stats: &[Stats],
    gone: &HashSet<u32>,
    since: Option<(f64, &[Stats])>,
) -> String {
    if rules.is_empty() {
        return NONE.to_owned();
    }
    let titles = "rule||packets to|bytes to|packets back|bytes back";
    let mut rows = vec![head(titles)];
    if since.is_some() {
        rows[0].extend(head("to/s|back/s"));
    }
    for (rule, now) in rules.iter().zip(stats) {
        let Stats { forward, reply, .. } = now;
        let (to, back) = (forward, reply);
        let mut cells = row([
            &now.id,
            &rule.rule,
            &to.packets,
            &to.bytes,
            &back.packets,
            &back.bytes,
        ]);
        let then = since.and_then(|(s, all)| Some((s, all.iter().find(|then| then.id == now.id)?)));
        if let Some((s, then)) = then {
            let rate =
                |now: Traffic, then: Traffic| now.packets.saturating_sub(then.packets) as f64 / s;
            let rates = [rate(*to, then.forward), rate(*back, then.reply)];
            cells.extend(rates.map(|rate| format!("{rate:.0}")));
        }
        if gone.contains(&now.id) {
            cells.push(NOT_IN_FORCE.to_owned());
        }
        rows.push(cells);
        for (reason, count) in &now.drops {
            rows.push(row([&"", &format!("not redirected: {count} ({reason})")]));
        }
    }
    let mut out = align(&rows, Words::In(&[1]));
    if !gone.is_empty() {
        out += BRING_BACK;
    }
    out
}

pub(super) fn list(json: bool) -> Result<()> {
    let store = actions::open(false)?;
    let rules = store.all()?;
    let gone = actions::gone(&rules)?;
    let carried = actions::carried()?;
    let never = actions::never(&rules);
    let mut strayed = actions::strayed(&rules);
    strayed.retain(|id, _| !gone.contains(id));
    // Who reads this may take long, and other commands wait for the lock.
    drop(store);
    if json {
        let listed = |installed: Installed| ListedRule {
            active: !gone.contains(&installed.id),
            carried_by: carried_by(&installed, &carried),
            never_because_of: never.get(&installed.id).cloned(),
            strayed: strayed.get(&installed.id).cloned(),
            installed,
        };
        let rules: Vec<ListedRule> = rules.into_iter().map(listed).collect();
        return print_json(&json!({ "rules": rules }));
    }
    print!("{}", list_text(&rules, &gone, &carried));
    for installed in &rules {
        if let Some(what) = never.get(&installed.id) {
            println!(
                "\nRule {} may never redirect anything, because of {what}",
                installed.id
            );
        }
    }
    for (id, what) in strayed {
        println!("\nRule {id} {what}");
    }
    Ok(())
}

/// What moves the packets of a rule at the moment.
fn carried_by(installed: &Installed, carried: &HashMap<u32, Carried>) -> Backend {
    carried
        .get(&installed.id)
        .filter(|_| !installed.fixed)
        .map_or(installed.plan.backend, Carried::backend)
}

/// The only device whose packets a rule is for.
fn limited_to(installed: &Installed) -> &str {
    let by_plan = || {
        let only = installed.plan.client_dev.as_ref();
        only.filter(|_| installed.plan.backend.is_bpf())
    };
    let named = installed.rule.dev.as_deref();
    named.unwrap_or_else(|| by_plan().map_or("any", |device| &device.name))
}

fn list_text(rules: &[Installed], gone: &HashSet<u32>, carried: &HashMap<u32, Carried>) -> String {
    if rules.is_empty() {
        return NONE.to_owned();
    }
    let mut rows = vec![head("rule|proto|from||to|device|backend|source")];
    for i in rules {
        let source = match (i.plan.snat, i.hairpin()) {
            (Some(address), None) => address.to_string(),
            (Some(address), Some(device)) => format!("the client's; by {device}: {address}"),
            (None, _) => "the client's".to_owned(),
        };
        let mut cells = row([
            &i.id,
            &i.rule.proto,
            &i.rule.from,
            &"=>",
            &i.rule.to,
            &limited_to(i),
            &carried_by(i, carried),
            &source,
        ]);
        if gone.contains(&i.id) {
            cells.push(NOT_IN_FORCE.to_owned());
        }
        rows.push(cells);
    }
    let mut out = align(&rows, Words::In(&[1, 2, 3, 4, 5, 6, 7, 8]));
    if !gone.is_empty() {
        out += BRING_BACK;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn installed(dev: Option<&str>) -> Installed {
        let mut installed = Installed::plain(3, "192.0.2.1:80");
        installed.rule.dev = dev.map(str::to_owned);
        installed
    }

    #[test]
    fn lists_say_what_is_not_in_force() {
        assert_eq!(list_text(&[], &HashSet::new(), &HashMap::new()), NONE);
        let text = list_text(&[installed(Some("eth0"))], &HashSet::new(), &HashMap::new());
        let words: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        let addresses = ["192.0.2.1:80", "=>", "192.0.2.9:99"];
        let expected = [
            &["3", "udp"],
            &addresses[..],
            &["eth0", "nft", "the", "client's"],
        ];
        assert_eq!(words, expected.concat());
        assert!(!text.contains("NOT IN FORCE"));
        let text = list_text(&[installed(None)], &HashSet::from([3]), &HashMap::new());
        testkit::assert_has(&text, &["NOT IN FORCE", "`mountain redirect restore`"]);
    }

    #[test]
    fn rates_are_of_the_time_between() {
        let stats = |packets| Stats {
            id: 3,
            forward: Traffic {
                packets,
                bytes: 100 * packets,
            },
            ..Stats::default()
        };
        let (then, now) = ([stats(10)], [stats(40)]);
        let none = HashSet::new();
        let plain = stats_text(&[installed(None)], &now, &none, None);
        testkit::assert_has(&plain, &[" 40 ", " 4000 "]);
        assert!(!plain.contains("NOT IN FORCE"), "{plain}");
        let gone = stats_text(&[installed(None)], &now, &HashSet::from([3]), None);
        testkit::assert_has(&gone, &["NOT IN FORCE", "`mountain redirect restore`"]);
        assert!(!plain.contains("/s"), "{plain}");
        let text = stats_text(&[installed(None)], &now, &none, Some((2.0, &then)));
        let words: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert!(words.ends_with(&["15", "0"]), "{text}");
        let mut dropped = stats(1);
        dropped.drops.insert("no neighbour".to_owned(), 5);
        let text = stats_text(&[installed(None)], &[dropped], &none, None);
        assert!(text.contains("not redirected: 5 (no neighbour)"), "{text}");
    }
}
