// SPDX-License-Identifier: GPL-2.0-or-later
//! The run file: what one measurement of one host saw, and under which circumstances.
//!
//! `mountain ping`, `mountain cpu` and `mountain import` write it; `mountain compare` and
//! `mountain report` read it. JSON, described in docs/measuring.md.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{bail, ensure, Context, Result};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::oneway::OneWay;
use super::stats::{quantile_unsorted, Reply, Table};
use crate::host::atomic_file;

/// Value of [`RunFile::schema`]; changes whenever an older reader would misunderstand the file.
pub const SCHEMA: &str = "mountain-run/1";

/// One measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunFile {
    /// [`SCHEMA`].
    pub schema: String,
    /// The name of its column in a comparison: `--label`, else the file's name.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "label"
    )]
    pub label: Option<String>,
    /// What measured: "mountain 0.1.0 icmp", "ping(8)", "irtt", "flent".
    pub tool: String,
    /// The command line that made it, or the file that was imported.
    pub command: String,
    /// Address or name that was probed.
    pub target: String,
    /// RFC 3339, UTC.
    pub started: String,
    /// From the first probe until the end, seconds.
    pub seconds: f64,
    /// Configured time between two probes, µs; `None` where it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval_us: Option<f64>,
    /// Payload bytes of a probe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub payload_bytes: Option<u32>,
    /// How the times in `rtt_us` were taken: "hardware", "kernel", "user" or "unknown".
    pub clock: String,
    /// Ended before its count was reached.
    #[serde(default)]
    pub interrupted: bool,
    /// One entry of each column per probe.
    pub samples: Samples,
    /// Busy shares of each CPU over the run; empty when not recorded.
    #[serde(default, skip_serializing_if = "Cpu::is_empty")]
    pub cpu: Cpu,
    /// The circumstances that a comparison holds against each other, by name:
    /// "kernel.release", "cpu.governor", "sysctl.net.ipv4.tcp_congestion_control", …
    pub environment: BTreeMap<String, Value>,
}

/// The probes, one column a property, all of the same length, in the order of sending.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Samples {
    /// Moment of sending, µs since the run's start.
    pub sent_us: Vec<f64>,
    /// Round-trip time, µs; `None`: lost.
    #[serde(deserialize_with = "rtts")]
    pub rtt_us: Vec<Option<f64>>,
    /// What user space saw, µs; empty when the tool does not tell.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "rtts"
    )]
    pub user_rtt_us: Vec<Option<f64>>,
    /// Delay of the forward direction, µs, up to a constant (the clocks' offset); empty without a
    /// reflector.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forward_us: Vec<Option<f64>>,
    /// The same of the backward direction.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backward_us: Vec<Option<f64>>,
    /// Indices of the answered probes in the order in which the answers arrived; empty: in the
    /// order of sending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub arrival: Vec<u32>,
}

/// CPU time by interval and CPU, as shares of 1.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cpu {
    /// How the kernel accounts: "tick" (samples at the tick), "irq-time" or "virt".
    pub accounting: String,
    /// Ends of the intervals, µs since the run's start.
    pub at_us: Vec<f64>,
    /// `shares[cpu][interval]`, by [`Cpu::KINDS`].
    pub shares: Vec<Vec<[f32; 6]>>,
    /// The kernel's number of each CPU in `shares`; empty (older files): 0, 1, 2, …
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub numbers: Vec<u32>,
}

impl Cpu {
    /// Kinds of CPU time, as mpstat(1) calls them; idle is the last.
    pub const KINDS: [&str; 6] = ["usr", "sys", "soft", "irq", "steal", "idle"];

    /// Nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.at_us.is_empty()
    }

    /// The kernel's number of the CPU at a place in `shares`.
    pub(crate) fn number(&self, at: usize) -> u32 {
        self.numbers.get(at).copied().unwrap_or(at as u32)
    }

    fn check(&self) -> Result<()> {
        sane("cpu.at_us", self.at_us.iter().copied())?;
        let (numbers, shares) = (self.numbers.len(), self.shares.len());
        ensure!(
            numbers == 0 || numbers == shares,
            "cpu.numbers has {numbers} entries, cpu.shares {shares}"
        );
        Ok(())
    }
}

/// Times beyond this are no measurement's; what is made of them would be nonsense. 30 years, µs.
const LONGEST_US: f64 = 1e15;

fn sane(column: &str, times_us: impl IntoIterator<Item = f64>) -> Result<()> {
    let bad = times_us
        .into_iter()
        .find(|us| us.is_nan() || us.abs() > LONGEST_US);
    match bad {
        Some(us) => bail!("{column} has a time of {us:e} µs, more than 30 years"),
        None => Ok(()),
    }
}

/// No round trip takes a day. µs.
const LONGEST_RTT_US: f64 = 86_400e6;
/// Characters of a label.
const LONGEST_LABEL: usize = 200;

/// No clock tells less apart, 1 ns. µs.
const SHORTEST_RTT_US: f64 = 1e-3;

/// Refuses round trips below 0 or of more than a day, and those above 0 of less than a nanosecond: no axis is that long.
pub(crate) fn check_rtt(rtt_us: Option<f64>) -> Result<()> {
    match rtt_us {
        Some(us) if !(0.0..=LONGEST_RTT_US).contains(&us) => {
            bail!("a round trip of {us} µs is not from 0 to 24 h")
        }
        Some(us) if us > 0.0 && us < SHORTEST_RTT_US => {
            bail!("a round trip of {us} µs is less than a nanosecond")
        }
        _ => Ok(()),
    }
}

/// Refuses a name that no table has room for.
pub(crate) fn check_label(label: &str) -> Result<()> {
    let length = label.chars().count();
    ensure!(
        length <= LONGEST_LABEL,
        "the label has {length} characters, at most {LONGEST_LABEL} are allowed"
    );
    Ok(())
}

/// A label, refused with the line where it stands.
fn label<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let label = Option::<String>::deserialize(from)?;
    check_label(label.as_deref().unwrap_or_default()).map_err(D::Error::custom)?;
    Ok(label)
}

/// Round trips, the first bad one refused with its line.
fn rtts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Option<f64>>, D::Error> {
    let column = Vec::<Rtt>::deserialize(from)?;
    Ok(column.into_iter().map(|rtt| rtt.0).collect())
}

/// A round trip that [`check_rtt`] accepts.
#[derive(Deserialize)]
#[serde(try_from = "Option<f64>")]
struct Rtt(Option<f64>);

impl TryFrom<Option<f64>> for Rtt {
    type Error = anyhow::Error;

    fn try_from(rtt_us: Option<f64>) -> Result<Self> {
        check_rtt(rtt_us)?;
        Ok(Self(rtt_us))
    }
}

/// What all files of mountain begin with.
#[derive(Deserialize)]
struct Schema {
    schema: String,
}

impl Schema {
    fn of(path: &Path) -> Option<Self> {
        serde_json::from_reader(BufReader::new(File::open(path).ok()?)).ok()
    }
}

/// Whether a file is of `mountain ab`.
pub(crate) fn is_ab(schema: &str) -> bool {
    schema.starts_with("mountain-ab/")
}

/// What is said of one.
pub(crate) const AB: &str = "this is a file of `mountain ab`, which has judged it; the samples of one half are a run file of \
                             their own: jq '.runs[0][0]' FILE";

impl RunFile {
    /// Reads a file; the error says what is wrong with it.
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display();
        let file = File::open(path).with_context(|| format!("cannot read {name}"))?;
        let run: RunFile = serde_json::from_reader(BufReader::new(file)).with_context(|| {
            let not = format!("{name} is not a run file of mountain");
            match Schema::of(path) {
                Some(schema) if is_ab(&schema.schema) => format!("{not}: {AB}"),
                Some(schema) if schema.schema != SCHEMA => {
                    format!("{not}, but of the schema {:?}", schema.schema)
                }
                _ => format!("{not} (other tools' logs: mountain import)"),
            }
        })?;
        if run.schema != SCHEMA {
            bail!(
                "{name} has the schema {:?}, this program reads {SCHEMA:?}",
                run.schema
            );
        }
        run.check().with_context(|| name.to_string())?;
        Ok(run)
    }

    /// Whether the columns fit each other and hold what a measurement can hold.
    pub(crate) fn check(&self) -> Result<()> {
        check_label(self.label.as_deref().unwrap_or_default())?;
        sane("seconds", [self.seconds * 1e6])?;
        sane("interval_us", self.interval_us)?;
        self.samples.check()?;
        self.cpu.check()
    }

    /// Writes the file as a whole or not at all.
    ///
    /// # Errors
    /// Also if [`Self::read`] would refuse it.
    pub fn write(&self, path: &Path) -> Result<()> {
        let checked = self.check();
        checked.with_context(|| format!("cannot write {}", path.display()))?;
        write_json(path, self)
    }
}

/// Writes a file as a whole or not at all.
pub(crate) fn write_json(path: &Path, content: &impl Serialize) -> Result<()> {
    let written = atomic_file::write(path, true, |out| Ok(serde_json::to_writer(out, content)?));
    written.with_context(|| format!("cannot write {}", path.display()))
}

/// [`Samples::arrival`] of answers that came in this order.
pub(super) fn arrival(order: Vec<u32>) -> Vec<u32> {
    match order.is_sorted() {
        true => Vec::new(),
        false => order,
    }
}

/// Delays of one direction above the least of it, µs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Direction {
    /// Half of them are at most this.
    pub median_us: f64,
    /// 99 of 100 are.
    pub p99_us: f64,
}

/// Of both: [`Samples::directions`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Directions {
    /// To the reflector.
    pub forward: Direction,
    /// From it.
    pub backward: Direction,
}

impl Samples {
    /// Probes sent.
    pub fn len(&self) -> usize {
        self.rtt_us.len()
    }

    /// No probe was sent.
    pub fn is_empty(&self) -> bool {
        self.rtt_us.is_empty()
    }

    /// How far each direction's delays are above their least, drift of the clocks taken out as the daemon does; `None`
    /// without a reflector.
    pub fn directions(&self) -> Option<Directions> {
        let mut filter = OneWay::new();
        let ns = |us: f64| (us * 1e3) as i64;
        let (mut forward, mut backward) = (Vec::new(), Vec::new());
        let sent = self.sent_us.iter();
        for ((at, f), b) in sent.zip(&self.forward_us).zip(&self.backward_us) {
            let (Some(f), Some(b)) = (f, b) else { continue };
            if let Some(over) = filter.push(ns(*at).unsigned_abs(), ns(*f), ns(*b)) {
                forward.push(over.forward_us);
                backward.push(over.backward_us);
            }
        }
        let figures = |mut of: Vec<u32>| {
            Some(Direction {
                median_us: quantile_unsorted(&mut of, 0.5)?,
                p99_us: quantile_unsorted(&mut of, 0.99)?,
            })
        };
        Some(Directions {
            forward: figures(forward)?,
            backward: figures(backward)?,
        })
    }

    /// The answers in the order of arrival, with the times of `column` (one of this file's).
    pub fn replies(&self, column: &[Option<f64>]) -> Vec<Reply> {
        let reply = |i: usize| {
            Some(Reply {
                seq: i as u64,
                rtt_us: (*column.get(i)?)?,
            })
        };
        if self.arrival.is_empty() {
            (0..column.len()).filter_map(reply).collect()
        } else {
            let order = self.arrival.iter();
            order.filter_map(|&i| reply(i as usize)).collect()
        }
    }

    /// The tables of `rtt_us` and `user_rtt_us` (if there is such a column), with the same
    /// thresholds: the ones given, µs, or chosen by the first.
    pub(crate) fn tables(&self, thresholds_us: &[f64]) -> (Table, Option<Table>) {
        let sent = self.len() as u64;
        let first = Table::new(sent, &self.replies(&self.rtt_us), thresholds_us);
        let same: Vec<f64> = first.over.iter().map(|o| o.threshold_us).collect();
        let user = (!self.user_rtt_us.is_empty())
            .then(|| Table::new(sent, &self.replies(&self.user_rtt_us), &same));
        (first, user)
    }

    /// How many of the last probes in a row were lost.
    pub(crate) fn silent_since(&self) -> usize {
        let last_first = self.rtt_us.iter().rev();
        last_first.take_while(|r| r.is_none()).count()
    }

    /// Whether the columns fit each other.
    fn check(&self) -> Result<()> {
        let n = self.len();
        ensure!(
            self.sent_us.len() == n,
            "sent_us has {} entries, rtt_us {n}",
            self.sent_us.len()
        );
        let columns = [
            ("rtt_us", &self.rtt_us),
            ("user_rtt_us", &self.user_rtt_us),
            ("forward_us", &self.forward_us),
            ("backward_us", &self.backward_us),
        ];
        for (name, len) in columns.map(|(name, column)| (name, column.len())) {
            ensure!(len == 0 || len == n, "{name} has {len} entries, rtt_us {n}");
        }
        sane("sent_us", self.sent_us.iter().copied())?;
        for (name, column) in columns {
            sane(name, column.iter().flatten().copied())?;
        }
        for (name, column) in &columns[..2] {
            let bad = |i: usize| format!("{name}: probe {i}");
            let mut checked = column.iter().enumerate();
            checked.try_for_each(|(i, v)| check_rtt(*v).with_context(|| bad(i)))?;
        }
        let mut arrived = vec![false; n];
        for (place, &i) in self.arrival.iter().enumerate() {
            let answered = self.rtt_us.get(i as usize).is_some_and(Option::is_some);
            ensure!(answered, "arrival names a probe that was not answered");
            let again = std::mem::replace(&mut arrived[i as usize], true);
            ensure!(!again, "arrival: entry {place} names probe {i} again");
        }
        // What it leaves out would not count as answered.
        let answered = self.rtt_us.iter().flatten().count();
        let named = self.arrival.len();
        ensure!(
            named == 0 || named == answered,
            "arrival names {named} of {answered} answered probes"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> RunFile {
        RunFile {
            schema: SCHEMA.into(),
            samples: Samples {
                sent_us: vec![0.0, 10e3],
                rtt_us: vec![Some(250.5), None],
                ..Samples::default()
            },
            ..RunFile::default()
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.json");
        run().write(&path).unwrap();
        assert_eq!(RunFile::read(&path).unwrap(), run());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_could_not_be_read_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.json");
        let mut far = run();
        far.samples.forward_us = vec![Some(2e15), None];
        let error = format!("{:#}", far.write(&path).unwrap_err());
        testkit::assert_has(&error, &["run.json", "forward_us has a time"]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn cpus_of_older_files_are_numbered_by_place() {
        let text = r#"{"accounting":"tick","at_us":[1.0],"shares":[[[1,0,0,0,0,0]]]}"#;
        let mut cpu: Cpu = serde_json::from_str(text).unwrap();
        assert_eq!((cpu.numbers.len(), cpu.number(0), cpu.number(3)), (0, 0, 3));
        cpu.numbers = vec![2];
        let again: Cpu = serde_json::from_str(&serde_json::to_string(&cpu).unwrap()).unwrap();
        assert_eq!((again.number(0), again), (2, cpu));
    }

    #[test]
    fn replies_come_in_the_order_of_arrival() {
        let mut samples = Samples {
            rtt_us: vec![Some(3.0), None, Some(1.0)],
            ..Samples::default()
        };
        let seqs = |s: &Samples| -> Vec<(u64, f64)> {
            let replies = s.replies(&s.rtt_us).into_iter();
            replies.map(|r| (r.seq, r.rtt_us)).collect()
        };
        assert_eq!(seqs(&samples), [(0, 3.0), (2, 1.0)]);
        samples.arrival = vec![2, 0];
        assert_eq!(seqs(&samples), [(2, 1.0), (0, 3.0)]);
        assert_eq!(samples.replies(&[]), []);
    }

    #[test]
    fn tables_share_thresholds_and_keep_the_order_of_arrival() {
        let samples = Samples {
            sent_us: vec![0.0, 10.0, 20.0, 30.0],
            rtt_us: vec![Some(1000.0), Some(900.0), Some(5000.0), None],
            user_rtt_us: vec![Some(2000.0), Some(1900.0), Some(6000.0), None],
            arrival: vec![0, 2, 1],
            ..Samples::default()
        };
        let (kernel, user) = samples.tables(&[]);
        let user = user.unwrap();
        assert_eq!((kernel.sent, kernel.count, kernel.reordered), (4, 3, 1));
        assert_eq!((user.count, user.reordered), (3, 1));
        let thresholds = |t: &Table| t.over.iter().map(|o| o.threshold_us).collect::<Vec<_>>();
        assert_eq!(thresholds(&kernel), thresholds(&user));
        assert_eq!(thresholds(&kernel)[0], 2000.0);
        assert_eq!(thresholds(&samples.tables(&[7.0]).0), [7.0]);
        assert_eq!(samples.silent_since(), 1);
        let (none, user) = Samples::default().tables(&[]);
        assert_eq!((none.delays, user), (None, None));
    }

    #[test]
    fn what_is_no_run_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.json");
        let refused = |text: String, why: &str| {
            std::fs::write(&path, text).unwrap();
            let error = format!("{:#}", RunFile::read(&path).unwrap_err());
            assert!(error.contains(why), "{error}");
        };
        refused("PING 10.0.0.1".into(), "mountain import");
        let changed = |change: fn(&mut RunFile), why: &str| {
            let mut other = run();
            change(&mut other);
            refused(serde_json::to_string_pretty(&other).unwrap(), why);
        };
        changed(|r| r.schema = "mountain-run/9".into(), "mountain-run/9");
        changed(|r| r.samples.sent_us.truncate(1), "sent_us has 1");
        changed(|r| r.samples.arrival = vec![1], "not answered");
        changed(|r| r.samples.rtt_us[0] = Some(1e300), "24 h at line 17");
        changed(|r| r.samples.rtt_us[0] = Some(-1.0), "24 h at line 17");
        changed(
            |r| (r.samples.rtt_us[1], r.samples.arrival) = (Some(1.0), vec![1]),
            "arrival names 1 of 2 answered probes",
        );
        let again = "entry 2 names probe 1 again";
        changed(
            |r| (r.samples.rtt_us[1], r.samples.arrival) = (Some(1.0), vec![1, 0, 1]),
            again,
        );
        let long = "201 characters, at most 200 are allowed at line 3";
        changed(|r| r.label = Some("x".repeat(201)), long);
        changed(|r| r.seconds = 1e12, "seconds has a time");
        changed(
            |r| (r.cpu.at_us, r.cpu.numbers) = (vec![1e6], vec![0, 2]),
            "cpu.numbers has 2",
        );
        let error = RunFile::read(&dir.path().join("none")).unwrap_err();
        assert!(error.to_string().contains("cannot read"), "{error}");
    }
}
