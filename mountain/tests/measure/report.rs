// SPDX-License-Identifier: GPL-2.0-or-later
//! `mountain report`: the page, what is on it, and that a browser shows it. The latter needs
//! chromium (`scripts/setup --test`).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{assert_has, stderr, stdout, MOUNTAIN};
use mountain::measure::runfile::{Cpu, RunFile, Samples, SCHEMA};
use serde_json::Value;
use testkit::page::{section, stands_alone};

const PLOTS: &str = "tail cdf histogram histogram-body histogram-tail";

/// A probe every 10 ms: 20 ms and up to 4 ms more.
fn run(count: usize) -> RunFile {
    let rtt = |i: usize| Some(20_000.0 + (i * 7919 % 4001) as f64);
    let environment = [
        ("kernel.release", "6.12.0"),
        ("cpu.governor", "<powersave>"),
    ];
    RunFile {
        schema: SCHEMA.into(),
        tool: "mountain 0.1.0 icmp".into(),
        command: "mountain ping 192.0.2.1".into(),
        target: "192.0.2.1".into(),
        started: "2026-01-02T03:04:05Z".into(),
        seconds: count as f64 / 100.0,
        clock: "kernel".into(),
        samples: Samples {
            sent_us: (0..count).map(|i| i as f64 * 10_000.0).collect(),
            rtt_us: (0..count).map(rtt).collect(),
            ..Samples::default()
        },
        environment: BTreeMap::from(environment.map(|(k, v)| (k.into(), Value::from(v)))),
        ..RunFile::default()
    }
}

fn with_cpus(mut run: RunFile, cpus: usize) -> RunFile {
    let seconds = run.seconds as usize;
    let share = |i: usize| {
        let soft = (i * 31 % 60) as f32 / 100.0;
        [0.1, 0.1, soft, 0.05, 0.0, 0.75 - soft]
    };
    run.cpu = Cpu {
        accounting: "irq-time".into(),
        at_us: (1..=seconds).map(|s| s as f64 * 1e6).collect(),
        shares: (0..cpus)
            .map(|cpu| (0..seconds).map(|s| share(cpu + s)).collect())
            .collect(),
        numbers: (0..cpus as u32).collect(),
    };
    run
}

/// What the command prints, or says when it fails.
fn report(files: &[PathBuf], dir: &Path) -> Result<String, String> {
    let mut command = Command::new(MOUNTAIN);
    command.arg("report").args(files).arg("-o").arg(dir);
    let output = command.output().unwrap();
    match output.status.code() {
        Some(0) => Ok(stdout(&output)),
        // For its arguments, 2.
        Some(code) if code == 1 + i32::from(files.is_empty()) => Err(stderr(&output)),
        code => panic!("{code:?}: {}", stderr(&output)),
    }
}

/// The page of `runs`, named run0, run1… by their files, and the folder it is in.
fn page(runs: &[RunFile]) -> (String, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let file = |i| dir.path().join(format!("run{i}.json"));
    let files: Vec<PathBuf> = (0..runs.len()).map(file).collect();
    for (run, file) in runs.iter().zip(&files) {
        run.write(file).unwrap();
    }
    let out = dir.path().join("out");
    let told = report(&files, &out).unwrap();
    let path = out.join("index.html");
    assert_eq!(told.trim_end(), path.to_str().unwrap());
    (fs::read_to_string(path).unwrap(), dir)
}

#[test]
fn two_runs_side_by_side() {
    let mut first = with_cpus(run(3_000), 2);
    first.label = Some("stock & <plain>".into());
    first.samples.rtt_us[1_500] = Some(987_654.0);
    first.samples.rtt_us[7] = None;
    let rtts = first.samples.rtt_us.iter();
    first.samples.user_rtt_us = rtts.map(|r| r.map(|us| us + 1_000.0)).collect();
    let mut second = run(3_000);
    let release = ("kernel.release".to_owned(), "6.13.0-steady".into());
    second.environment.extend([release]);
    second.clock = "user".into();
    let (html, dir) = page(&[first, second]);
    stands_alone(&html);
    assert!(html.contains("stock &amp; &lt;plain&gt;") && !html.contains("<plain>"));

    let table = section(&html, "table");
    assert!(table.contains("<th scope=\"col\">run1</th>"));
    assert!(table.contains("<td>987.654 ms</td>") && table.contains("<td>988.654 ms</td>"));
    assert!(table.contains("<td>2999</td>") && table.contains("<td>0.03 %</td>"));
    assert!(table.contains("not taken alike: kernel, user"), "{table}");
    let timeline = section(&html, "timeline");
    assert!(timeline.contains("1 outlier, the largest 987.654 ms."));
    // Ringed on the screen's and the phone's plot.
    assert_eq!(timeline.matches("<circle").count(), 2);
    assert!(timeline.contains("CPU 1") && timeline.contains("accounts by irq-time"));
    for id in ["timeline", "tail", "cdf", "histogram"] {
        assert!(section(&html, id).contains("<polyline"), "{id}");
    }

    let difference = section(&html, "difference");
    let (differs, agrees) = difference.split_once("<details>").unwrap();
    assert!(differs.contains("1 recorded circumstance differs, 1 agree."));
    assert!(differs.contains("6.12.0") && differs.contains("6.13.0-steady"));
    assert!(!differs.contains("governor") && agrees.contains("&lt;powersave&gt;"));

    let files = PLOTS.split(' ').chain(["timeline-1", "timeline-2"]);
    for name in files {
        let svg = fs::read_to_string(dir.path().join(format!("out/{name}.svg"))).unwrap();
        assert!(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
        assert!(!svg.contains("#0B0"), "{name}: a colour is only a name");
        let first = name == "timeline-1";
        let ours = ["run1", "stock &amp; &lt;plain&gt;"][usize::from(first)];
        assert!(svg.contains(ours), "{name} has no legend");
        let png = fs::read(dir.path().join(format!("out/{name}.png"))).unwrap();
        assert!(png.starts_with(b"\x89PNG") && png.len() > 5_000, "{name}");
    }
}

#[test]
fn nothing_sent_nothing_answered() {
    let mut silent = run(500);
    silent.samples.rtt_us = vec![None; 500];
    let (html, dir) = page(&[run(0), silent.clone()]);
    stands_alone(&html);
    let table = section(&html, "table");
    let answered = "run1: no probe was answered (100% loss)";
    let sent = "run0: no probe was sent";
    assert_has(table, &[sent, answered, "<td>100.00 %</td>"]);
    for id in ["tail", "cdf", "histogram"] {
        let body = section(&html, id);
        assert!(body.contains("No probe was answered.") && !body.contains("<svg"));
    }
    assert!(!dir.path().join("out/cdf.svg").exists());
    assert!(section(&html, "difference").contains("Nothing: all 2"));

    // Beside a run with answers they do not disturb.
    let (html, _dir) = page(&[silent, run(1)]);
    let cdf = section(&html, "cdf");
    assert!(cdf.contains("run1") && cdf.contains("<svg"));
    assert!(!cdf.contains("run0"), "it has no line");
}

#[test]
fn a_million_samples_keep_their_extreme() {
    let mut long = with_cpus(run(1_000_000), 16);
    long.samples.rtt_us[777_777] = Some(4_321_987.0);
    let (html, _dir) = page(&[long]);
    stands_alone(&html);
    let timeline = section(&html, "timeline");
    assert!(timeline.contains("the largest 4321.987 ms"));
    assert_eq!(timeline.matches("<circle").count(), 2);
    assert!(section(&html, "table").contains("<td>4321.987 ms</td>"));
    println!("a page of {} bytes", html.len());
}

#[test]
fn an_earlier_reports_plots_go_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let files = ["a", "b", "c"].map(|name| dir.path().join(format!("{name}.json")));
    files.iter().for_each(|file| run(50).write(file).unwrap());
    let mut silent = run(50);
    silent.samples.rtt_us = vec![None; 50];
    silent.write(&files[2]).unwrap();
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    // A name that a report could have, but this is the user's.
    fs::write(out.join("timeline-9.svg"), "mine").unwrap();
    let made = |files: &[PathBuf]| {
        report(files, &out).unwrap();
        let entries = fs::read_dir(&out).unwrap();
        let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
        names.collect::<std::collections::BTreeSet<_>>()
    };
    let names = made(&files[..2]);
    assert!(names.contains("timeline-2.svg") && names.contains("cdf.png"));
    fs::write(out.join("timeline-2.png"), "drawn over").unwrap();
    let expected = [
        ".mountain-report.json",
        "index.html",
        "timeline-1.png",
        "timeline-1.svg",
        "timeline-2.png",
        "timeline-9.svg",
    ];
    // Of a run without answers there is nothing but a time-line.
    assert!(made(&files[2..]).iter().eq(expected.iter()));
    assert_eq!(fs::read(out.join("timeline-9.svg")).unwrap(), b"mine");
}

#[test]
fn what_somebody_else_has_made_or_changed_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.json");
    run(50).write(&file).unwrap();
    let report = |out: &Path| report(std::slice::from_ref(&file), out);
    let count = |out: &Path| fs::read_dir(out).unwrap().count();
    let refused = |out: &Path, name: &str| {
        let before = count(out);
        fs::write(out.join(name), "mine").unwrap();
        let said = report(out).unwrap_err();
        let foreign = said.contains("was not written by mountain report");
        assert!(said.contains(name) && foreign, "{said}");
        assert_eq!(fs::read(out.join(name)).unwrap(), b"mine");
        assert_eq!(count(out), before.max(1), "nothing is begun");
    };
    for name in ["index.html", "cdf.svg", "histogram.png"] {
        let own = dir.path().join(name.replace('.', "-"));
        fs::create_dir(&own).unwrap();
        refused(&own, name);
    }
    // Its own are written over, but not what became of them; and written again when they are gone.
    let out = dir.path().join("out");
    for name in ["index.html", "cdf.svg"] {
        for _ in 0..2 {
            report(&out).unwrap();
        }
        refused(&out, name);
        fs::remove_file(out.join(name)).unwrap();
    }
    report(&out).unwrap();
    assert!(fs::read(out.join("cdf.svg")).unwrap().starts_with(b"<svg"));
}

#[test]
fn a_list_that_cannot_be_saved_removes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let files = ["a", "b"].map(|name| dir.path().join(format!("{name}.json")));
    files.iter().for_each(|file| run(50).write(file).unwrap());
    let out = dir.path().join("out");
    report(&files, &out).unwrap();
    // In place of the list a folder that is not empty: no file takes its place.
    let list = out.join(".mountain-report.json");
    let kept = dir.path().join("list");
    fs::rename(&list, &kept).unwrap();
    fs::create_dir_all(list.join("in")).unwrap();
    // And nothing in the way that would be refused before.
    let entries = fs::read_dir(&out).unwrap().flatten().map(|e| e.path());
    let in_the_way = |path: &PathBuf| !path.to_string_lossy().contains("timeline-2");
    for path in entries.filter(|p| p.is_file()).filter(in_the_way) {
        fs::remove_file(path).unwrap();
    }
    let said = report(&files[..1], &out).unwrap_err();
    assert!(said.contains("cannot write"), "{said}");
    assert!(out.join("timeline-2.svg").exists());
    assert!(!out.join("index.html").exists());
    fs::remove_dir_all(&list).unwrap();
    fs::rename(&kept, &list).unwrap();
    report(&files[..1], &out).unwrap();
    assert!(!out.join("timeline-2.svg").exists());
}

#[test]
fn what_cannot_be_read_or_written_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let good = dir.path().join("good.json");
    run(3).write(&good).unwrap();
    let foreign = dir.path().join("foreign.txt");
    fs::write(&foreign, "PING 192.0.2.1").unwrap();
    let fails = |files: &[PathBuf], out: &Path, why: &str| {
        let said = report(files, out).unwrap_err();
        assert!(said.contains(why), "{said}");
    };
    let out = dir.path().join("out");
    fails(&[good.clone(), foreign.clone()], &out, "mountain import");
    fails(&[dir.path().join("none.json")], &out, "cannot read");
    assert!(!out.exists(), "nothing is begun");
    fails(&[good], &foreign.join("out"), "cannot make");
    fails(&[], &out, "RUN.json");
}

/// What to look at a page like.
#[derive(Clone, Copy, PartialEq)]
enum Medium {
    Screen,
    /// As printed, by somebody who reads light letters on dark ground.
    Paper,
}

/// Gives the rules for paper to a reader of dark pages.
const ON_PAPER: &str = "for (const rule of document.styleSheets[0].cssRules) {
        const media = rule.media && rule.media.mediaText;
        if (media === 'print' || /dark/.test(media)) rule.media.mediaText = 'all';
    }";

/// What a script in a copy of the page sees of it in a frame of this width, and what the browser complained of.
fn in_browser(html: &str, dir: &Path, width: u32, medium: Medium) -> (Value, String) {
    let prelude = match medium {
        Medium::Screen => "",
        Medium::Paper => ON_PAPER,
    };
    let script = "<script>addEventListener('load', () => {
        PRELUDE
        const visible = s => s.getClientRects().length > 0;
        const all = selector => [...document.querySelectorAll(selector)];
        const shown = all('svg').filter(visible);
        const inside = s => s.parentElement.parentElement;
        const index = list => list.map((e, i) => visible(e) ? i : -1).filter(i => i >= 0);
        const look = {
            window: innerWidth,
            page: document.documentElement.scrollWidth,
            shown: shown.length,
            cut: shown.filter(s => inside(s).scrollWidth > inside(s).clientWidth).length,
            wide: shown.filter(s => s.getClientRects()[0].width < 250).length,
            tables: all('.scroll').filter(s => s.scrollWidth > s.clientWidth).length,
            ground: getComputedStyle(document.body).backgroundColor,
            ink: getComputedStyle(document.querySelector('td')).color,
            captions: all('.paper').filter(visible).map(e => e.textContent),
            links: all('.files').filter(visible).length,
        };
        look.zooms = all('.zoom > input').map(input => {
            input.click();
            const links = all('.zoom .files a').filter(visible);
            return [index(all('.zoom figure')), links.map(a => a.getAttribute('href'))];
        });
        parent.postMessage('look' + JSON.stringify(look) + 'look', '*');
    })</script></body>";
    let script = script.replace("PRELUDE", prelude);
    fs::write(dir.join("copy.html"), html.replace("</body>", &script)).unwrap();
    // A window has a least width that is above a phone's; a frame has not.
    let frame = dir.join("frame.html");
    let listen = "<script>onmessage = e => document.title = e.data</script>";
    let style = "border: 0; height: 800px";
    let inner = format!("<iframe src=copy.html style='{style}; width: {width}px'></iframe>");
    fs::write(&frame, format!("{listen}{inner}")).unwrap();
    let output = Command::new("chromium")
        .args(["--headless=new", "--no-sandbox", "--disable-gpu"])
        .args(["--enable-logging=stderr", "--dump-dom"])
        .arg("--virtual-time-budget=3000")
        .arg(format!("--user-data-dir={}", dir.join("browser").display()))
        .arg(format!("file://{}", frame.display()))
        .output()
        .expect("chromium is missing: scripts/setup --test");
    let (dom, said) = (stdout(&output), stderr(&output));
    let look = dom.split("look").nth(1);
    let look = look.unwrap_or_else(|| panic!("no title: {said}"));
    (serde_json::from_str(look).unwrap(), said)
}

#[test]
fn a_browser_shows_it_on_a_phone_too() {
    let mut first = with_cpus(run(3_000), 4);
    first.label = Some("a_very_long_label_without_a_place_to_break_it_that_goes_on".into());
    first.command = "x".repeat(190);
    let (html, dir) = page(&[first, with_cpus(run(2_000), 4)]);
    for (width, page_width) in [(360, 360), (1100, 1100)] {
        let (look, said) = in_browser(&html, dir.path(), width, Medium::Screen);
        let complaints: Vec<&str> = said.lines().filter(|l| l.contains("CONSOLE")).collect();
        assert!(complaints.is_empty(), "{complaints:?}");
        assert_eq!(look["window"], width, "{look}");
        assert!(look["page"].as_u64().unwrap() <= page_width, "{look}");
        // Two time-lines, tail, CDF, and one of the histograms.
        assert_eq!(look["shown"], 5, "{look}");
        for many in ["cut", "wide"] {
            assert_eq!(look[many], 0, "{many}: {look}");
        }
        // Each zoom shows its plot, with the links to that plot's files, and nothing else.
        let links = |name: &str| [".svg", ".png"].map(|end| format!("{name}{end}"));
        let expected = serde_json::json!([
            [[0], links("histogram")],
            [[1], links("histogram-body")],
            [[2], links("histogram-tail")],
        ]);
        assert_eq!(look["zooms"], expected);
        assert_eq!(look["captions"], serde_json::json!([]));
    }
    // And what would be wrong is noticed.
    let broken = html.replace(
        "</body>",
        "<p style='width: 900px'>.</p><script>nowhere()</script></body>",
    );
    let (look, said) = in_browser(&broken, dir.path(), 360, Medium::Screen);
    assert!(look["page"].as_u64().unwrap() > 360, "{look}");
    assert!(said.lines().any(|l| l.contains("CONSOLE")), "{said}");
}

/// A4 with the margins of the browser leaves 717 CSS pixels.
#[test]
fn on_paper_nothing_is_dark_cut_off_or_hidden() {
    let mut runs: Vec<RunFile> = (0..3).map(|_| with_cpus(run(1_000), 4)).collect();
    for run in &mut runs {
        run.label = Some("a label that is rather long and goes on".into());
        let rtts = run.samples.rtt_us.iter();
        run.samples.user_rtt_us = rtts.map(|r| r.map(|us| us + 1_000.0)).collect();
        run.command = "mountain ping ".repeat(12);
    }
    let (html, dir) = page(&runs);
    let (look, _) = in_browser(&html, dir.path(), 717, Medium::Paper);
    assert_eq!((&look["tables"], &look["cut"]), (&0.into(), &0.into()));
    assert!(look["page"].as_u64().unwrap() <= 717, "{look}");
    assert_eq!(look["ground"], "rgb(255, 255, 255)", "{look}");
    assert_eq!(look["ink"], "rgb(0, 0, 0)", "{look}");
    // Three time-lines, tail, CDF, and all of the histograms, which say what they are.
    assert_eq!(look["shown"], 8, "{look}");
    let captions = ["everything", "P1 to P99", "from P99 on"];
    assert_eq!(look["captions"], serde_json::json!(captions));
    assert_eq!(look["links"], 0, "links are of no use there");
    // On a screen of that width the same table is scrolled.
    let (look, _) = in_browser(&html, dir.path(), 717, Medium::Screen);
    assert_ne!(look["tables"], 0, "{look}");
}
