"""The speed benchmark: what it asks for, and what its table says."""

from __future__ import annotations

import numpy as np
import pytest

from eval import bench_table
from eval.bench import after_first_wave, codec_alone, lengths, texts
from eval.records import RequestRow


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
        "targets": {
            "custom": {"kind": "engine", "model": "dummy:1.7b-customvoice", "weights": "random"},
            "base": {"kind": "http", "server_models": {"data": [{"id": "embedded", "weights": "trained"}]}},
        },
        "ladder": {"base": {"c4": figures() | {"later_ttfa_ms": {"p95": 12.4}}, "poisson5": figures()}},
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
    table = bench_table.markdown(results)
    assert "dummy:1.7b-customvoice: random weights; embedded: trained weights. Lengths of" in table
    assert "| c4 | 10 ms | 21 ms | 12 ms | 99.6 | 0 |" in table
    assert "| 5 requests/s | 10 ms | 21 ms |  | 99.6 | 0 |" in table


def row(index, dispatched, first):
    return RequestRow(
        id=f"r{index}",
        cell="c2",
        index=index,
        session=0,
        utterance="u",
        text="one",
        voice="v",
        seed=0,
        scheduled=dispatched,
        dispatched=dispatched,
        finished=dispatched + first + 0.1,
        status="ok",
        warmup=index < 0,
        language="english",
        first_byte=dispatched + first,
        chunk_times=[dispatched + first],
        chunk_samples=[1920],
        sample_rate=24000,
    )


def test_first_audio_after_the_first_wave_leaves_out_each_workers_first_request():
    rows = [row(-1, 0.0, 9.0), row(0, 1.0, 0.8), row(1, 1.001, 0.9), row(2, 2.0, 0.02), row(3, 2.1, 0.04)]
    later = after_first_wave(rows, 2)
    assert later is not None and later["count"] == 2
    assert abs(later["p50"] - 30.0) < 1e-6 and abs(later["maximum"] - 40.0) < 1e-6
    assert after_first_wave(rows[:3], 2) is None


@pytest.mark.slow
def test_the_codec_alone_runs_with_the_settings_given():
    got = codec_alone({"codec.dtype": "bfloat16", "model": "of no use here"}, batch=1, frames=1)
    assert got["dtype"] == "torch.bfloat16" and got["x_real_time"] == pytest.approx(80 / got["ms"])
