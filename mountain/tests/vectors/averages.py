#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-or-later
"""Writes averages.json: python3 averages.py > averages.json

An implementation of its own, in Python's unbounded integers, of the definition in
docs/steering.md ("The two averages"), so that the vectors do not merely repeat what one of the tested
implementations says.
"""
import json
import random

INTERVAL_NS = 10_000_000
MAX_CATCH_UP = 64


def advance(state, k, data, elapsed):
    load, delta = state
    if elapsed > MAX_CATCH_UP:
        return 0, 0
    for i in range(elapsed):
        rate = data * 100 if i == 0 else 0
        load = (k * rate + (1024 - k) * load) // 1024
        delta = (k * abs(rate - load) + (1024 - k) * delta) // 1024
    return load, delta


def case(name, k, steps):
    state = (0, 0)
    out = []
    for data, elapsed in steps:
        state = advance(state, k, data, elapsed)
        assert max(state) < 1 << 63
        out.append([data, elapsed, *state])
    return {"name": name, "k": k, "steps": out}


rng = random.Random(1024)
cases = []
for k in (0, 1, 102, 512, 1023, 1024):
    cases.append(case("constant 12,500 bytes an interval, then silence", k,
                      [(12_500, 1)] * 40 + [(0, 1)] * 20))
    cases.append(case("one byte", k, [(1, 1)] * 5 + [(0, 1)] * 5))
    cases.append(case("100 Gbit/s", k, [(125_000_000, 1)] * 5 + [(0, 1), (125_000_000, 3)]))
    for gap in (2, 3, 10, 63, 64, 65, 1000, 1 << 40):
        cases.append(case(f"gap of {gap} intervals", k,
                          [(60_000, 1)] * 8 + [(1_500, gap), (9_000, 1), (0, 0), (3_000, 2)]))
    cases.append(case("random", k,
                      [(rng.choice([0, rng.randrange(1, 1_500), rng.randrange(125_000)]),
                        rng.choice([0, 1, 1, 1, 1, 2, 5, rng.randrange(1, 80)]))
                       for _ in range(60)]))

about = ("Each step is [bytes, elapsed, ema_load, ema_time_delta]: `elapsed` intervals of "
         "interval_ns ended, the first of which carried `bytes`, the others none; the two averages "
         "(bytes per second) are those after the step. Averages start at 0. More than "
         "max_catch_up intervals: both 0. Written by averages.py.")
print('{\n "about": %s,\n "interval_ns": %d,\n "max_catch_up": %d,\n "cases": [' %
      (json.dumps(about), INTERVAL_NS, MAX_CATCH_UP))
print(",\n".join("  " + json.dumps(c) for c in cases))
print(" ]\n}")
