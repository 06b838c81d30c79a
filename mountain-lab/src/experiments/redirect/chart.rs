// SPDX-License-Identifier: GPL-2.0-or-later
//! CPU time by second as stacked bars, a panel a row.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Result;
use mountain::measure::runfile::{Cpu, RunFile};
use mountain::report::page::{escape, standalone};
use mountain::report::plots::{hex, PARTS};
use mountain::report::raster;
use mountain_lab::result::write_atomically;

/// All kinds before it are stacked, from below.
const IDLE: usize = Cpu::KINDS.len() - 1;
const WIDTH: f64 = 720.0;
const LEFT: f64 = 150.0;
const HEAD: f64 = 40.0;
const PANEL: f64 = 90.0;
const GAP: f64 = 14.0;

/// Share of one kind in one interval, over all processors.
pub fn mean(cpu: &Cpu, interval: usize, kind: usize) -> f64 {
    let sum: f32 = cpu.shares.iter().map(|one| one[interval][kind]).sum();
    f64::from(sum) / cpu.shares.len().max(1) as f64
}

/// Writes `cpu.svg` and `cpu.png` into a folder.
pub fn write(rows: &BTreeMap<String, RunFile>, dir: &Path) -> Result<PathBuf> {
    let svg = standalone(&draw(rows));
    write_atomically(&dir.join("cpu.png"), &raster::png(&svg)?)?;
    let path = dir.join("cpu.svg");
    write_atomically(&path, svg.as_bytes())?;
    Ok(path)
}

fn draw(rows: &BTreeMap<String, RunFile>) -> String {
    let height = HEAD + rows.len() as f64 * (PANEL + GAP) + 24.0;
    let ends = rows.values().filter_map(|r| r.cpu.at_us.last());
    // All panels on one scale of time.
    let longest = ends.copied().fold(1.0, f64::max);
    let x = |us: f64| LEFT + us / longest * (WIDTH - LEFT - 10.0);
    let mut out = format!(
        "<svg width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"13\" role=\"img\" \
         aria-label=\"CPU time by second of each row, stacked\">\n"
    );
    for (kind, name) in Cpu::KINDS[..IDLE].iter().enumerate() {
        let at = LEFT + kind as f64 * 80.0;
        let colour = hex(PARTS[kind]);
        let _ = writeln!(
            out,
            "<rect x=\"{at}\" y=\"10\" width=\"12\" height=\"12\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"21\">{name}</text>",
            at + 17.0
        );
    }
    for (i, (name, record)) in rows.iter().enumerate() {
        let top = HEAD + i as f64 * (PANEL + GAP);
        let bottom = top + PANEL;
        let _ = writeln!(
            out,
            "<text x=\"8\" y=\"{}\">{}</text><text x=\"{}\" y=\"{}\" text-anchor=\"end\">100%</text>\
             <path d=\"M{LEFT} {top}V{bottom}H{}\" fill=\"none\" stroke=\"#888888\"/>",
            top + PANEL / 2.0,
            escape(name),
            LEFT - 6.0,
            top + 11.0,
            WIDTH - 10.0
        );
        let mut from = 0.0;
        for (interval, end) in record.cpu.at_us.iter().enumerate() {
            let (left, width) = (x(from), x(*end) - x(from));
            from = *end;
            let mut base = bottom;
            for (kind, name) in Cpu::KINDS[..IDLE].iter().enumerate() {
                let share = mean(&record.cpu, interval, kind);
                let height = share * PANEL;
                base -= height;
                let _ = writeln!(
                    out,
                    "<rect x=\"{left:.1}\" y=\"{base:.2}\" width=\"{:.1}\" height=\"{height:.2}\" \
                     fill=\"{}\"><title>{name} {:.1}%</title></rect>",
                    (width - 1.0).max(0.5),
                    hex(PARTS[kind]),
                    share * 100.0
                );
            }
        }
    }
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"{}\">0</text><text x=\"{}\" y=\"{}\" text-anchor=\"end\">{:.1} s</text>\n</svg>",
        height - 10.0,
        WIDTH - 10.0,
        height - 10.0,
        longest / 1e6
    );
    out
}
