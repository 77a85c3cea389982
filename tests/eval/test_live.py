"""Figures of a run that goes on, and the names that the page may ask for."""

import xml.etree.ElementTree as ET

import pytest

from eval import live
from eval.errors import RunFolderError
from tests.eval.test_metrics import row
from ui.load_tab import SAME, levels, overrides
from ui.run_manager import RunManager


def test_charts_of_nothing_and_of_rows_are_well_formed():
    assert "nothing yet" in live.charts([])
    rows = [row(index=i, dispatched=i * 0.5, finished=i * 0.5 + 2, chunk_times=(i * 0.5 + 0.2, i * 0.5 + 0.3))
            for i in range(5)]  # fmt: skip
    tree = ET.fromstring(f"<div>{live.charts(rows)}</div>")
    captions = [e.text for e in tree.iter("figcaption")]
    assert captions[0] == "TTFA: p50 200, p95 200 ms"
    assert captions[1].startswith("Audio made: 1.88")  # 5 x 1.5 s of audio in 4 s
    assert captions[2].startswith("In flight: 0")
    assert captions[3].startswith("Underruns so far: 0")


def test_only_the_stretch_that_runs_is_drawn_and_warmup_is_not():
    rows = [row(), row(session=1, dispatched=0.0, chunk_times=(0.5, 0.6)), row(session=1, warmup=True)]
    assert "p50 500" in live.charts(rows)


def test_markup_in_a_title_stays_text():
    assert "<b>" not in live.chart("<b>x</b>", [live.Series("<i>", [(0, 1)])], "")


def test_one_line_for_each_load():
    rows = [row(), row(cell="c4"), row(cell="c4", status="busy", chunk_times=(), chunk_samples=(), first_byte=None)]
    table = live.table(rows)
    assert [line[:2] for line in table] == [["c1", "1/1"], ["c4", "1/2"]]
    assert table[1][-1] == "1 busy" and len(table[0]) == len(live.TABLE_HEAD)


@pytest.mark.parametrize(
    ("kind", "top", "sweep", "expected"),
    [
        ("c", 8, False, ("c8",)),
        ("c", 8, True, ("c1", "c2", "c4", "c8")),
        ("c", 6, True, ("c1", "c2", "c4", "c6")),
        ("poisson", 1, True, ("poisson1",)),
    ],
)
def test_levels_of_a_sweep(kind, top, sweep, expected):
    assert levels(kind, top, sweep) == expected


def test_drop_downs_become_engine_settings():
    assert overrides(SAME, SAME) == {}
    assert overrides("sync", "72") == {
        "talker.scheduler_mode": "sync",
        "codec.mode": "windowed",
        "codec.left_context": 72,
    }


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "/etc", ".hidden", "x\n", None])
def test_a_run_is_asked_for_by_name_only(name, tmp_path):
    (tmp_path / "run.json").write_text('{"format": 1}')
    with pytest.raises(RunFolderError):
        RunManager(None, tmp_path / "runs").open(name)
