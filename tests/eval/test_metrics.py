"""Listener metrics against values worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import metrics
from eval.pcm import audible_onset, window_dbfs
from eval.records import RequestRow


def row(**changes) -> RequestRow:
    base = dict(
        id="c1-00000", cell="c1", index=0, session=0, utterance="u", text="twelve chars", voice="v", seed=1,
        scheduled=0.0, dispatched=0.0, finished=2.0, status="ok", first_byte=0.1,
        chunk_times=(0.2, 0.5), chunk_samples=(24_000, 12_000), onset=None,
    )  # fmt: skip
    return RequestRow(**(base | changes))


@pytest.mark.parametrize(
    ("arrivals", "durations", "waited", "longest", "events"),
    [
        ([], [], 0, 0, 0),
        ([5.0], [1.0], 0, 0, 0),
        ([0.0, 1.0, 2.0], [1.0, 1.0, 1.0], 0, 0, 0),  # just in time
        ([0.0, 1.5], [1.0, 1.0], 0.5, 0.5, 1),
        ([0.0, 1.5, 3.0], [1.0, 1.0, 1.0], 1.0, 0.5, 2),  # the wait shifts what follows: 1.5 + 1.0 -> 2.5 -> waits 0.5
        ([0.0, 0.1, 4.0], [1.0, 2.0, 1.0], 1.0, 1.0, 1),  # early chunks build a buffer
        ([0.0, 0.1, 2.9], [1.0, 2.0, 1.0], 0, 0, 0),
    ],
)
def test_playback_without_a_start_buffer(arrivals, durations, waited, longest, events):
    got = metrics.playback(arrivals, durations)
    assert (got.waited, got.longest, got.events) == (pytest.approx(waited), pytest.approx(longest), events)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 2)), min_size=1, max_size=30))
def test_playing_ends_when_the_audio_and_the_waits_have_passed(steps):
    arrivals = np.cumsum([gap for gap, _ in steps])
    durations = [d for _, d in steps]
    got = metrics.playback(list(arrivals), durations)
    end = arrivals[0] + sum(durations) + got.waited  # the definition, from the listener's side
    assert end >= arrivals[-1] + durations[-1] - 1e-6
    assert got.longest <= got.waited + 1e-9


def test_ttfa_is_the_first_sample_not_the_header():
    got = metrics.cell_metrics([row(dispatched=0.05)])
    assert got.first_byte_ms.mean == pytest.approx(50)
    assert got.ttfa_ms.mean == pytest.approx(150)
    assert got.e2e_ms.mean == pytest.approx(1950)


@pytest.mark.parametrize(
    ("onset", "expected"), [(0, 200), (23_999, 200), (24_000, 500), (35_999, 500), (None, None), (40_000, None)]
)
def test_audible_ttfa_is_the_arrival_of_the_chunk_that_holds_the_onset(onset, expected):
    got = metrics.audible_ttfa_ms(row(onset=onset))
    assert got == (None if expected is None else pytest.approx(expected))


def test_failures_are_counted_and_kept_out_of_latencies():
    rows = [row(), row(status="busy", finished=0.01, chunk_times=(), chunk_samples=(), first_byte=None)]
    rows += [row(status="unfinished", finished=60.0), row(warmup=True, finished=90.0)]
    got = metrics.cell_metrics(rows)
    assert (got.requests, got.ok, got.failures) == (3, 1, {"busy": 1, "unfinished": 1})
    assert got.e2e_ms.maximum == pytest.approx(2000)
    assert got.window_s == pytest.approx(60)


def test_throughput_has_its_audio_seconds_beside_it():
    rows = [row(dispatched=float(i), finished=i + 2.0, chunk_times=(i + 0.2, i + 0.5)) for i in range(3)]
    got = metrics.cell_metrics(rows)
    assert got.window_s == pytest.approx(4)
    assert got.requests_per_s == pytest.approx(3 / 4)
    assert got.x_real_time == pytest.approx(4.5 / 4)
    assert got.mean_audio_s == pytest.approx(1.5)
    assert got.x_real_time_request.mean == pytest.approx(0.75)
    assert got.peak_in_flight == 2


def test_a_continued_cell_adds_its_sessions_and_not_the_night_between():
    rows = [row(), row(session=1, dispatched=10.0, finished=11.0)]
    assert metrics.cell_metrics(rows).window_s == pytest.approx(3)


def test_continuity_shares():
    smooth, short, long = row(), row(chunk_times=(0.2, 1.28)), row(chunk_times=(0.2, 1.5))
    got = metrics.cell_metrics([smooth, short, long])  # waits: 0, 80 ms, 300 ms
    assert got.continuity == {
        "<= 50 ms": pytest.approx(1 / 3), "<= 100 ms": pytest.approx(2 / 3), "<= 200 ms": pytest.approx(2 / 3),
    }  # fmt: skip
    assert got.underrun_events == 2
    assert got.underrun_ms.maximum == pytest.approx(300)


def test_percentiles_and_intervals():
    got = metrics.distribution(list(range(1, 102)))
    assert (got.mean, got.p50, got.p95, got.p99) == (51, 51, 96, 100)
    assert got.ci["mean"][0] < 51 < got.ci["mean"][1]
    assert metrics.distribution([]) is None
    assert metrics.distribution([3.0]).ci == {}
    assert metrics.distribution(list(range(50))).ci == metrics.distribution(list(range(50))).ci


def test_bootstrap_interval_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(3)
    hits = 0
    for i in range(100):
        low, high = metrics.bootstrap_mean(rng.normal(10, 2, 40), seed=i)
        hits += low <= 10 <= high
    assert 85 <= hits <= 100


def test_in_flight_peak_does_not_count_one_that_ends_as_the_next_begins():
    rows = [row(dispatched=0.0, finished=1.0), row(dispatched=1.0, finished=2.0)]
    assert metrics.peak_in_flight(rows) == 1


def test_no_rows_at_all():
    got = metrics.cell_metrics([])
    assert got.requests == 0 and got.ttfa_ms is None and got.x_real_time == 0


# ---- audible onset -----------------------------------------------------------------------------------------------

RATE = 24_000


def tone(seconds, level_dbfs):
    t = np.arange(round(seconds * RATE)) / RATE
    return (10 ** (level_dbfs / 20) * np.sqrt(2) * np.sin(2 * np.pi * 440 * t)).astype(np.float32)


def test_levels_in_dbfs():
    assert window_dbfs(tone(0.2, -20), RATE) == pytest.approx(-20, abs=0.6)
    assert window_dbfs(np.zeros(RATE, np.float32), RATE).max() == -200
    assert window_dbfs(np.zeros(0, np.float32), RATE).size == 0


@pytest.mark.parametrize(("lead", "level"), [(0.0, -20), (0.08, -20), (0.46, -40)])
def test_onset_after_leading_silence(lead, level):
    pcm = np.concatenate([np.zeros(round(lead * RATE), np.float32), tone(0.5, level)])
    assert audible_onset(pcm, RATE) == pytest.approx(lead * RATE, abs=0.021 * RATE)


def test_one_click_is_not_an_onset_and_quiet_noise_neither():
    click = np.zeros(RATE, np.float32)
    click[5000:5100] = 0.05  # 4 ms: audible in two overlapping windows only if they are louder than -45 dBFS
    quiet = np.concatenate([tone(0.5, -50), tone(0.5, -20)])
    assert audible_onset(quiet, RATE) == pytest.approx(0.5 * RATE, abs=0.021 * RATE)
    assert audible_onset(tone(1, -50), RATE) is None
    assert audible_onset(np.zeros(100, np.float32), RATE) is None
    single = np.zeros(RATE, np.float32)
    single[4800:4820] = 0.02  # 1 ms
    assert audible_onset(single, RATE) is None
