"""The speed benchmark: what it asks for, and what its table says."""

from __future__ import annotations

import numpy as np

from eval import bench_table
from eval.bench import lengths, texts


def figures(ok=10, requests=10, events=0):
    return {
        "requests": requests,
        "ok": ok,
        "underrun_events": events,
        "x_real_time": 99.6,
        "ttfa_ms": {"p50": 10.2, "p95": 20.7},
    }


def test_lengths_and_texts_are_fixed_by_the_seed():
    drawn = lengths(2000)
    assert drawn.min() >= 12 and drawn.max() <= 110 and abs(drawn.mean() - 50) < 1.5
    assert np.array_equal(drawn, lengths(2000)) and not np.array_equal(drawn, lengths(2000, seed=1))
    spoken = texts(300)
    assert spoken == texts(300) and {len(u.text.split()) for u in spoken} == {10}
    assert len({u.text for u in spoken}) == 300  # lengths are looked up by text


def test_the_highest_rate_ends_at_the_first_that_was_interrupted_or_failed():
    assert bench_table.highest_rate([(20, figures()), (10, figures()), (30, figures(events=1)), (40, figures())]) == 20
    assert bench_table.highest_rate([(10, figures(ok=9))]) is None
    assert bench_table.highest_rate([]) is None


def test_the_table_says_what_was_measured_what_failed_and_what_was_not_run():
    about = {"device": "X", "date": "today", "torch": "2", "commit": "abc", "way": "over HTTP", "quick": False}
    results = {
        "about": about | {"seconds": 3.0},
        "cells": {"custom-c1": figures(ok=9)},
        "rates": {"10": figures(), "20": figures(events=2)},
        "errors": {"base": "EngineFailed: no memory"},
        "codec": {"ms": 4.0, "x_real_time": 2560.0},
    }
    lines = {
        line.split("|")[1].strip(): line.split("|")[2].strip()
        for line in bench_table.markdown(results).splitlines()
        if line.startswith("| ")
    }
    assert lines["CustomVoice, c1"] == "TTFA p50 10, p95 21 ms, 100 ×, 0 interruptions, 1 failed"
    assert lines["CustomVoice, c32"] == "not run"
    assert lines["Base, cloned voice, c64"] == "failed: EngineFailed: no memory"
    assert lines["CustomVoice, highest rate without interruption"].startswith("10 req/s (10: TTFA")
    assert lines["codec alone, 32 streams × 4 frames"] == "4.00 ms, 2560 ×"
