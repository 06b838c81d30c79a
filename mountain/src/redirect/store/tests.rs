// SPDX-License-Identifier: GPL-2.0-or-later
use super::*;
use crate::redirect::Proto;

fn rule(id: u32) -> Installed {
    let mut installed = Installed::plain(id, &format!("192.0.2.1:{}", 1000 + id));
    installed.rule.dev = (id == 1).then(|| "eth0".to_owned());
    if id == 2 {
        installed.plan.fixes.push(Fix::Sysctl {
            path: "net/ipv4/ip_forward".to_owned(),
            before: "0".to_owned(),
            value: "1".to_owned(),
        });
    }
    installed
}

fn open(dir: &Path, make: bool) -> Store {
    Store::open_at(dir.to_owned(), 7, make, lock::WAIT).unwrap()
}

fn ids(rules: &[Installed]) -> Vec<u32> {
    rules.iter().map(|i| i.id).collect()
}

#[test]
fn what_is_added_is_found_until_it_is_removed() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("redirect-1");
    assert!(open(&dir, false).is_empty());
    assert!(!dir.exists(), "reading makes nothing");
    let rules = [rule(0), rule(1), rule(2)];
    {
        let mut store = open(&dir, true);
        assert_eq!(store.free_ids(2).unwrap(), [0, 1]);
        store.adding(&rules).unwrap();
        assert_eq!(store.all().unwrap(), []);
        store.added(&rules).unwrap();
    }
    let mut store = open(&dir, false);
    assert_eq!(store.all().unwrap(), rules);
    assert_eq!(store.half_done().unwrap(), []);
    let of = |proto| store.parse(|e| e.is_from(proto, rules[1].rule.from));
    assert_eq!(ids(&of(Proto::Udp).unwrap()), [1]);
    assert_eq!(of(Proto::Tcp).unwrap(), []);
    let some = store.by_ids([2, 0, 9].into_iter()).unwrap();
    assert_eq!(ids(&some), [2, 0]);
    let to = store
        .parse(|e| e.is_to(Proto::Udp, rules[0].rule.to))
        .unwrap();
    assert_eq!(ids(&to), [0, 1, 2]);
    let fixes = store.fixes(|_| true).unwrap();
    assert_eq!(fixes, rules[2].plan.fixes.iter().cloned().collect());
    assert!(store.fixes(|e| e.id != 2).unwrap().is_empty());
    assert_eq!(store.all_of(Backend::Tcx).unwrap(), []);
    assert_eq!(ids(&store.one(|e| e.id > 0).unwrap()), [1]);
    assert_eq!(store.one(|e| e.id > 2).unwrap(), []);
    store.removing(&rules[1..2]).unwrap();
    store.removed(&rules[1..2]).unwrap();
    assert_eq!(store.free_ids(2).unwrap(), [1, 3]);
    drop(store);
    let mut store = open(&dir, false);
    assert_eq!(ids(&store.all().unwrap()), [0, 2]);
    store.removing(&[rule(0), rule(2)]).unwrap();
    store.removed(&[rule(0), rule(2)]).unwrap();
    drop(store);
    assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);
}

#[test]
fn what_was_half_done_is_known() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("redirect-1");
    let mut store = open(&dir, true);
    store.adding(&[rule(0), rule(1)]).unwrap();
    store.added(&[rule(0)]).unwrap();
    store.removing(&[rule(0)]).unwrap();
    drop(store);
    // Killed while it wrote a line, and while it made the file longer.
    for (file, torn) in [("rules-0", &b"{\"id\":5,"[..]), ("index", &[1, 2, 3])] {
        let mut file = File::options().append(true).open(dir.join(file)).unwrap();
        file.write_all(torn).unwrap();
    }
    let store = open(&dir, false);
    let half = store.half_done().unwrap();
    let expected = [(RuleState::Removing, rule(0)), (RuleState::Adding, rule(1))];
    assert_eq!(half, expected);
    assert_eq!(store.len(), 2);
    drop(store);
    // And it goes on.
    let mut store = open(&dir, true);
    store.removed(&[rule(0), rule(1)]).unwrap();
    store.adding(&[rule(2)]).unwrap();
    assert_eq!(store.half_done().unwrap(), [(RuleState::Adding, rule(2))]);
}

#[test]
fn history_does_not_pile_up() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("redirect-1");
    let mut store = open(&dir, true);
    store.adding(&[rule(0)]).unwrap();
    store.added(&[rule(0)]).unwrap();
    for _ in 0..2000 {
        let one = [rule(1)];
        store.adding(&one).unwrap();
        store.added(&one).unwrap();
        store.removing(&one).unwrap();
        store.removed(&one).unwrap();
    }
    let files = fs::read_dir(&dir).unwrap().map(Result::unwrap);
    let sizes: Vec<u64> = files.map(|file| file.metadata().unwrap().len()).collect();
    assert_eq!(sizes.len(), 2, "index and rules");
    assert!(sizes.iter().sum::<u64>() < 2 * TIDY_BYTES, "{sizes:?}");
    drop(store);
    assert_eq!(open(&dir, false).all().unwrap(), [rule(0)]);
}

#[test]
fn what_is_of_another_namespace_or_version_is_not_ours() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("redirect-1");
    let mut store = open(&dir, true);
    store.adding(&[rule(0)]).unwrap();
    drop(store);
    let other = Store::open_at(dir.clone(), 8, false, lock::WAIT).unwrap();
    assert!(other.is_empty(), "of a former namespace of that number");
    drop(other);
    assert!(!dir.exists());
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("index"), [7; RECORD]).unwrap();
    let why = |why: &str| {
        let store = open(&dir, true);
        let damage = store.damage().unwrap_or("none");
        assert!(damage.contains(why), "{damage}");
    };
    why("another version");
    // It is shorter than its head.
    fs::write(dir.join("index"), [7; RECORD - 1]).unwrap();
    why("damaged");
    let damaged = [head(7, 0), [9; RECORD]];
    fs::write(dir.join("index"), damaged.as_flattened()).unwrap();
    why("damaged");
    assert!(dir.join("index").exists(), "left for who can read it");
    // Set aside, it is in nobody's way.
    let mut store = open(&dir, true);
    let kept = store.set_aside().unwrap();
    let index = fs::read(kept.join("index")).unwrap();
    assert_eq!(index, damaged.as_flattened());
    store.adding(&[rule(0)]).unwrap();
    store.added(&[rule(0)]).unwrap();
    drop(store);
    assert_eq!(open(&dir, false).all().unwrap(), [rule(0)]);
    // A line is cut short.
    let file = File::options().write(true).open(dir.join("rules-0"));
    file.unwrap().set_len(20).unwrap();
    why("cannot read");
}

/// Any user could hold the lock, and keep root's commands waiting for ever.
#[test]
fn nobody_else_can_hold_commands_up() {
    use std::os::unix::fs::PermissionsExt;
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("redirect-1");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let mut store = open(&dir, true);
    store.adding(&[rule(0)]).unwrap();
    store.added(&[rule(0)]).unwrap();
    drop(store);
    assert_eq!(mode(&dir), 0o700);
    for file in ["index", "rules-0"] {
        assert_eq!(mode(&dir.join(file)), 0o600, "{file}");
    }
    // Made by an earlier version, for all to read, and somebody has locked it.
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    let held = Flock::lock(
        File::open(&dir).unwrap(),
        nix::fcntl::FlockArg::LockExclusive,
    );
    let wait = Duration::from_millis(50);
    let me = format!("by process {} (", std::process::id());
    // The kernel's list of locks has gaps while others take and release theirs.
    let mut errors = (0..20).map(|_| {
        let failed = Store::open_at(dir.clone(), 7, false, wait);
        failed.err().expect("it is locked").to_string()
    });
    assert!(errors.any(|error| error.contains(&me)));
    assert_eq!(mode(&dir), 0o700, "nobody else opens it from now on");
    drop(held);
    assert_eq!(open(&dir, false).all().unwrap(), [rule(0)]);
}

#[test]
fn no_more_than_fit() {
    let base = tempfile::tempdir().unwrap();
    let store = open(&base.path().join("redirect-1"), true);
    assert_eq!(store.free_ids(MAX_RULES).unwrap().len(), MAX_RULES);
    let error = store.free_ids(MAX_RULES + 1).unwrap_err();
    assert!(error.to_string().contains("no more than 65536"), "{error}");
}

#[test]
fn a_namespace_has_a_number_of_its_own() {
    assert_ne!(namespace_cookie().unwrap(), 0);
    assert_eq!(namespace_cookie().unwrap(), namespace_cookie().unwrap());
}
