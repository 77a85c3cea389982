"""Traces: written cheaply, read back, turned into tables and a plot."""

from __future__ import annotations

import json
import threading
import time

import pytest

from engine.errors import ConfigError
from engine.trace import Trace
from engine.trace_tables import Request, Work, main, read_trace, render


def write_events(path, events):
    path.write_text("".join(json.dumps(e) + "\n" for e in events))
    return path


@pytest.fixture
def two_requests(tmp_path):
    """a: heard after 100 ms, one gap of 80 ms too late by 40. b: cancelled before its first chunk."""
    return write_events(
        tmp_path / "trace.jsonl",
        [
            {"t": 10.00, "event": "trace", "wall": 1.7e9, "pid": 1},
            {"t": 10.00, "event": "enqueue", "request": "a", "task": "base"},
            {"t": 10.02, "event": "enqueue", "request": "b"},
            {"t": 10.05, "event": "prefill", "request": "a", "rows": 40},
            {"t": 10.06, "event": "step", "ms": 10, "streams": 2, "prefills": 1},
            {"t": 10.10, "event": "codec", "ms": 20, "frames": 1, "streams": 2},
            {"t": 10.10, "event": "chunk", "request": "a", "index": 0, "frames": 1},
            {"t": 10.11, "event": "first_byte", "request": "a"},
            {"t": 10.15, "event": "end", "request": "b", "reason": "cancelled", "frames": 0},
            {"t": 10.22, "event": "codec", "ms": 20, "frames": 2, "streams": 1, "graph": False},
            {"t": 10.22, "event": "chunk", "request": "a", "index": 1, "frames": 2},
            {"t": 10.40, "event": "end", "request": "a", "reason": "stop", "frames": 3},
        ],
    )


def test_a_trace_reads_back_what_was_written(tmp_path):
    path = tmp_path / "deep" / "t.jsonl"
    trace = Trace(path, config="abc")
    assert trace
    before = time.monotonic()
    trace.event("enqueue", "r1", task="base", chars=5)
    trace.event("chunk", "r1", index=0, frames=4)
    trace.close()
    trace.event("end", "r1")  # after close: dropped, not an error
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["trace", "enqueue", "chunk"]
    assert lines[0]["config"] == "abc" and lines[1]["request"] == "r1"
    assert before - 1e-3 <= lines[1]["t"] <= lines[2]["t"] <= time.monotonic()


def test_off_costs_next_to_nothing(tmp_path):
    trace = Trace(None)
    assert not trace
    started = time.perf_counter()
    for i in range(20_000):
        trace.event("chunk", "r1", index=i, frames=4)
    assert (time.perf_counter() - started) / 20_000 < 5e-6
    assert list(tmp_path.iterdir()) == []


def test_lines_of_many_threads_stay_whole(tmp_path):
    trace = Trace(tmp_path / "t.jsonl")

    def write(name):
        for i in range(500):
            trace.event("chunk", name, index=i, frames=1)

    threads = [threading.Thread(target=write, args=(f"r{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    data = read_trace(tmp_path / "t.jsonl")
    assert data.skipped == 0
    assert {r.id: len(r.chunks) for r in data.requests} == {f"r{i}": 500 for i in range(4)}


def test_the_last_events_reach_the_file_without_another(tmp_path):
    """A process that is killed while it idles has lost nothing of before."""
    trace = Trace(tmp_path / "t.jsonl")
    trace.event("end", "r1", reason="stop", frames=3)
    limit = time.monotonic() + 5
    while "r1" not in (tmp_path / "t.jsonl").read_text():
        assert time.monotonic() < limit
        time.sleep(0.05)
    trace.close()


def test_two_writers_share_a_file(tmp_path):
    """The server notes first bytes in the file of an engine that runs in a child process."""
    engine, server = Trace(tmp_path / "t.jsonl"), Trace(tmp_path / "t.jsonl")
    for i in range(3000):
        (engine if i % 2 else server).event("chunk", "r", index=i, frames=1)
    engine.close()
    server.close()
    data = read_trace(tmp_path / "t.jsonl")
    assert data.skipped == 0 and len(data.requests[0].chunks) == 3000
    assert data.requests[0].chunks == sorted(data.requests[0].chunks)


def test_a_path_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the trace"):
        Trace(tmp_path / "file" / "t.jsonl")


def test_numbers_of_a_known_trace(two_requests):
    data = read_trace(two_requests)
    a, b = data.requests
    assert a.ttfa_ms == pytest.approx(100) and b.ttfa_ms is None
    assert a.audio_s == pytest.approx(0.24)
    assert a.underrun_ms == pytest.approx(40)  # 80 ms heard from 10.10 on, the next chunk came at 10.22
    assert (a.reason, b.reason) == ("stop", "cancelled")
    assert data.span_s == pytest.approx(0.40)
    assert data.codec.busy(data.span_s) == pytest.approx(0.1)
    assert data.codec.eager == 1


def test_overlapping_runs_are_busy_once():
    work = Work([(1.0, 1000, 1, 1), (1.5, 1000, 1, 1), (3.0, 500, 1, 1)])
    assert work.busy(3.0) == pytest.approx((1.5 + 0.5) / 3)


def test_tables_name_what_they_show(two_requests):
    text = render(read_trace(two_requests))
    assert "2 requests, 0.40 s, 0.2 s of audio (0.60 × real time)" in text
    assert "codec: 2 runs, busy 10.0 % of the time, mean 20.00 ms, mean batch 1.50, 1 eager" in text
    row = next(line for line in text.splitlines() if line.startswith("a "))
    assert row.split() == ["a", "0.000", "50", "100", "110", "2", "0.24", "0.40", "40", "stop"]
    interval = next(line for line in text.splitlines() if line.startswith("interval 1→2"))
    assert interval.split()[-6:] == ["1", "120.0", "120.0", "120.0", "120.0", "120.0"]


def test_the_cut_line_of_a_killed_process_is_counted(two_requests):
    with two_requests.open("a") as file:
        file.write('{"t": 10.5, "event": "chu')
    data = read_trace(two_requests)
    assert data.skipped == 1 and len(data.requests) == 2
    assert "1 lines were no events" in render(data)


def test_a_request_that_never_ended_is_unfinished():
    request = Request("x", enqueued=1.0, chunks=[(1.5, 4)])
    assert (request.reason, request.stop) == ("unfinished", 1.5)


def test_the_command_prints_and_plots(two_requests, tmp_path, capsys):
    from PIL import Image

    out = tmp_path / "t.png"
    assert main([str(two_requests), "--plot", str(out)]) == 0
    assert "Milliseconds to and between chunks" in capsys.readouterr().out
    with Image.open(out) as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 20  # something is drawn


@pytest.mark.parametrize("content", [None, "", "not json\n", '{"event": "trace"}\n'])
def test_the_command_says_what_is_wrong_with_a_file(tmp_path, capsys, content):
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_text(content)
    assert main([str(path)]) == 2
    assert "trace-tables: " in capsys.readouterr().err


def test_a_plot_that_cannot_be_written_is_said(two_requests, capsys):
    assert main([str(two_requests), "--plot", "/nonexistent/x.png"]) == 2
    assert "cannot write the plot" in capsys.readouterr().err
