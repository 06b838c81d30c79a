#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-or-later
"""Makes the recordings pam2025-*.csv.gz from the dataset that they are taken from.

    pam2025.py DATASET [OUT]      DATASET: a clone of NUWiNS/pam2025-multi-carrier-dataset, or its
                                  git directory; OUT: a folder, this one by default

Three operators at once were pinged from a car, five times a second, in windows of 30 s. For each pair
of operators this writes the windows in which both have at least 15 s in common. Columns: window,
t_ms (time of sending since the window's first probe of both), path, rtt_ms (empty: lost). The clocks of the
phones were set by the network; how far they were apart is not known.

Dataset: "A Large-Scale Study of the Potential of Multi-Carrier Access in the 5G Era", PAM 2025,
CC0-1.0. The logs are datasets/raw_files/ping/.
"""

import gzip
import io
import itertools
import pathlib
import re
import subprocess
import sys

OPERATORS = ("atnt", "tmobile", "verizon")
ROOT = "datasets/raw_files/ping"
LEAST_OVERLAP_MS = 15_000
# Seconds between the starts of two logs after which they cannot overlap.
LONGEST_MS = 60_000


def logs(dataset):
    """(operator, text) of every log."""
    git = ["git", f"--git-dir={dataset if (dataset / 'HEAD').exists() else dataset / '.git'}"]
    names = subprocess.run(git + ["ls-tree", "-r", "--name-only", "HEAD", ROOT],
                           check=True, capture_output=True, text=True).stdout.splitlines()
    names = [n for n in names if n.endswith(".out")]
    batch = subprocess.run(git + ["cat-file", "--batch"], check=True, capture_output=True,
                           input="".join(f"HEAD:{n}\n" for n in names).encode()).stdout
    stream = io.BytesIO(batch)
    for name in names:
        size = int(stream.readline().split()[2])
        text = stream.read(size).decode(errors="replace")
        stream.read(1)
        operator = next((o for o in OPERATORS if f"/{o}/" in name), None)
        if operator:
            yield operator, text


def samples(text):
    """(start, [(time of sending, RTT or None)]), ms since the epoch, or None if nothing is in it."""
    start = re.search(r"^Start time: (\d+)", text, re.M)
    total = re.search(r"^.* (\d+) packets transmitted.* time (\d+)ms", text, re.M)
    answers = {}
    for seq, rtt in re.findall(r"icmp_seq=(\d+) .*?time=([\d.]+) ms", text):
        answers.setdefault(int(seq), float(rtt))
    if not start or not answers:
        return None
    start = int(start.group(1))
    sent = int(total.group(1)) if total else max(answers)
    # ping waits 200 ms between probes, and a little more.
    interval = int(total.group(2)) / (sent - 1) if total and sent > 1 else 200.0
    return start, [(start + (seq - 1) * interval, answers.get(seq)) for seq in range(1, sent + 1)]


def windows(first, second):
    """Pairs of logs that overlap long enough, cut to what they have in common."""
    second = sorted(second, key=lambda log: log[0])
    for start, one in sorted(first, key=lambda log: log[0]):
        for other_start, two in second:
            if abs(other_start - start) > LONGEST_MS:
                continue
            begin = max(one[0][0], two[0][0])
            end = min(one[-1][0], two[-1][0])
            if end - begin >= LEAST_OVERLAP_MS:
                yield begin, [[s for s in log if begin <= s[0] <= end] for log in (one, two)]


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    out = pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else pathlib.Path(__file__).parent
    by_operator = {operator: [] for operator in OPERATORS}
    for operator, text in logs(pathlib.Path(sys.argv[1])):
        log = samples(text)
        if log:
            by_operator[operator].append(log)
    for pair in itertools.combinations(OPERATORS, 2):
        rows = []
        count = 0
        for begin, both in windows(*(by_operator[o] for o in pair)):
            window = [(round(at - begin), name, rtt) for name, log in zip(pair, both) for at, rtt in log]
            rows += [(count, *row) for row in sorted(window, key=lambda r: (r[0], r[1]))]
            count += 1
        name = out / f"pam2025-{'-'.join(pair)}.csv.gz"
        text = ["# NUWiNS/pam2025-multi-carrier-dataset, CC0-1.0; made by pam2025.py", "window,t_ms,path,rtt_ms"]
        text += [f"{w},{t},{p},{'' if rtt is None else f'{rtt:g}'}" for w, t, p, rtt in rows]
        with open(name, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
            packed.write(("\n".join(text) + "\n").encode())
        print(f"{name.name}: {count} windows, {len(rows)} probes")


if __name__ == "__main__":
    main()
