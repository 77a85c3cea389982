"""Run folders: made once, continued after a cut, rendered again, compared. Against the server of known delays."""

import json
import re

import numpy as np
import pytest
import soundfile

from eval import compare, summary
from eval.__main__ import main
from eval.datasets import bundled_voices
from eval.errors import EvalError, RunFolderError
from eval.folder import RunFolder
from eval.runs import Run, clones, rerender
from eval.scoring import ScoreSettings
from eval.settings import RunSettings, TargetSpec, read_experiment
from tests.eval.known_server import RATE, serving


@pytest.fixture(scope="module")
def known():
    with serving() as server:
        for reference in bundled_voices().values():
            pcm, rate = reference.pcm()
            assert rate == RATE
            server.clips[reference.transcript] = np.rint(pcm * 32767).astype("<i2")
        yield server


def server(known, **fields):
    return TargetSpec("server", server={"url": known.url, "voices": "none"} | fields)


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(json.dumps({"chunks": [[0.03, 0.2], [0.1, 0.1 * (i + 1)]]}) for i in range(6)))
    return str(path)


def test_a_run_leaves_everything_that_is_needed_to_judge_it(known, texts, tmp_path):
    settings = RunSettings(dataset=texts, variants={"": server(known)}, cells=("c1", "c2"), warmup=1)
    result = Run.new(tmp_path / "run", settings).execute()
    folder = RunFolder.open(tmp_path / "run")
    facts = folder.facts
    assert facts["state"] == "done" and facts["settings_hash"] == settings.hash
    assert facts["git"].keys() == {"revision", "dirty"} and facts["versions"]["numpy"] and facts["host"]["cores"] >= 1
    lines = folder.path.joinpath("arrivals.jsonl").read_text().splitlines()
    assert len(lines) == 2 * (6 + 6)  # each text has a voice of its own, and each is met before
    rows = folder.rows()
    assert len([r for r in rows if not r.warmup]) == 12 and all(r.ok and r.onset is not None for r in rows)
    for row in rows:
        pcm, rate = soundfile.read(folder.path / row.audio, dtype="int16")
        assert pcm.size == row.samples and rate == RATE
    assert not list(folder.path.glob("audio/*.pcm"))
    assert [f["load"]["peak_in_flight"] for f in result["figures"]] == [1, 2]
    assert all("client_lag" in s for s in facts["sessions"])
    page = folder.path.joinpath("report.html").read_text()
    assert not re.search(r"""(src|href)=["']https?://""", page)  # self-contained
    assert page.count("<svg") >= 3 and "2 at once" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))  # several figures in one page


def test_the_same_texts_and_seeds_in_every_cell(known, texts, tmp_path):
    settings = RunSettings(dataset=texts, variants={"": server(known)}, cells=("c1", "burst3"), warmup=0)
    Run.new(tmp_path / "run", settings).execute()
    asked = {c: [(r.utterance, r.seed) for r in sorted(RunFolder.open(tmp_path / "run").rows(), key=lambda r: r.index)
                 if r.cell == c] for c in settings.cells}  # fmt: skip
    assert asked["c1"] == asked["burst3"]


def test_a_folder_is_never_overwritten(known, texts, tmp_path):
    settings = RunSettings(dataset=texts, variants={"": server(known)}, warmup=0)
    Run.new(tmp_path / "run", settings)
    with pytest.raises(RunFolderError, match="not empty"):
        Run.new(tmp_path / "run", settings)


def test_a_stopped_run_goes_on_and_measures_nothing_twice(known, texts, tmp_path):
    settings = RunSettings(dataset=texts, variants={"": server(known)}, cells=("c1", "c2"), warmup=1)
    run = Run.new(tmp_path / "run", settings, on_row=lambda row: run.stop() if row.index == 2 else None)
    assert run.execute()["state"] == "stopped"
    folder = RunFolder.open(tmp_path / "run")
    first = {r.id: r.sha256 for r in folder.rows() if not r.warmup}
    assert 3 <= len(first) < 12
    with (folder.path / "requests.jsonl").open("a") as out:
        out.write('{"id": "c1-000')  # and the machine died while a row was written
    asked_before = len(known.bodies)
    result = Run(folder).execute()
    rows = [r for r in folder.rows() if not r.warmup]
    assert result["state"] == "done" and len(rows) == 12 and len({r.id for r in rows}) == 12
    assert {r.id: r.sha256 for r in rows if r.id in first} == first
    assert len(known.bodies) - asked_before == 12 - len(first) + 2 * 6  # what was left, and the warm-up of two cells
    again = len(known.bodies)
    assert Run(folder).execute()["figures"] == result["figures"]
    assert len(known.bodies) == again  # a complete run asks nothing


def test_a_crash_in_the_middle_keeps_what_was_measured(known, texts, tmp_path):
    settings = RunSettings(dataset=texts, variants={"": server(known)}, warmup=0)

    def crash(row):
        if row.index == 3:
            raise RuntimeError("the lights went out")

    with pytest.raises(BaseException):  # noqa: B017 - an exception group around it
        Run.new(tmp_path / "run", settings, on_row=crash).execute()
    folder = RunFolder.open(tmp_path / "run")
    assert folder.facts["state"] == "broken off" and len(folder.rows()) >= 4
    assert Run(folder).execute()["figures"][0]["load"]["ok"] == 6


def test_it_is_rendered_again_without_a_server(texts, tmp_path):
    with serving() as gone:
        settings = RunSettings(dataset=texts, variants={"": server(gone)}, warmup=0)
        result = Run.new(tmp_path / "run", settings).execute()
    (tmp_path / "run" / "report.html").unlink()
    assert rerender(RunFolder.open(tmp_path / "run"))["figures"] == result["figures"]
    assert (tmp_path / "run" / "report.html").is_file()
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "copy"), "--clips", "2"]) == 0
    assert {p.name for p in (tmp_path / "copy").iterdir()} == {"summary.json", "report.html"}
    with pytest.raises(EvalError, match="no speech server"):
        Run.new(tmp_path / "other", settings).execute()


def test_a_b_b_a(known, texts, tmp_path):
    slow = server(known, extra={"input": json.dumps({"chunks": [[0.25, 0.3]]})})
    settings = RunSettings(dataset=texts, variants={"A": server(known), "B": slow}, cells=("c1",), warmup=0)
    Run.new(tmp_path / "run", settings).execute()
    folder = RunFolder.open(tmp_path / "run")
    assert [s["variant"] for s in folder.facts["sessions"]] == ["A", "B", "B", "A"]
    a, b = (compare.Side.of(folder, name) for name in "AB")
    assert sorted(r.index for r in a.rows) == sorted(r.index for r in b.rows) == list(range(6))
    findings = {f.name: f for f in compare.compare(a, b)}
    assert findings["TTFA p50, ms"].verdict == "worse" and findings["TTFA p50, ms"].change > 3
    assert main(["compare", f"{folder.path}:A", f"{folder.path}:B"]) == 1
    assert main(["compare", f"{folder.path}:A", f"{folder.path}:A"]) == 0
    assert main(["compare", str(folder.path), str(folder.path)]) == 2  # which variant?


def test_failures_are_in_the_figures_and_in_the_coverage(known, tmp_path):
    good, bad = json.dumps({"chunks": [[0.0, 0.2]]}), json.dumps({"chunks": [], "status": 503})
    (tmp_path / "t.txt").write_text(f"{good}\n{bad}\n{good}\n")
    settings = RunSettings(dataset=str(tmp_path / "t.txt"), variants={"": server(known)}, warmup=0)
    result = Run.new(tmp_path / "run", settings).execute()
    assert result["figures"][0]["load"]["failures"] == {"busy": 1}
    assert "1 busy" in (tmp_path / "run" / "report.html").read_text()


# ---- settings ----------------------------------------------------------------------------------------------------


def test_settings_survive_the_file(known):
    settings = RunSettings(
        cells=("c1", "poisson2"), voices=("Heart",), score=ScoreSettings(asr=("base",)), variants={"": server(known)}
    )
    again = RunSettings.from_dict(json.loads(json.dumps(settings.to_dict())))
    assert again == settings and again.hash == settings.hash


def test_an_api_key_is_not_written_down(known):
    settings = RunSettings(variants={"": server(known, api_key="secret")})
    assert "secret" not in json.dumps(settings.to_dict())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cells": ()}, "at least one load"),
        ({"cells": ("c1", "c1")}, "twice"),
        ({"cells": ("x",)}, "say c8"),
        ({"requests": -1}, "requests"),
        ({"deadline_s": 0}, "deadline"),
        ({"frames": 1}, "frames"),
        ({"keep_audio": "some"}, "keep_audio"),
        ({"variants": {"": TargetSpec("ship")}}, "target kind"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_made(changes, words):
    with pytest.raises(EvalError, match=words):
        RunSettings(**changes)


def test_experiments_are_checked_against_the_engines_settings(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("title: T\na: {talker.scheduler_mode: sync}\nb: {talker.scheduler_mode: async}\n")
    sides, title = read_experiment(path)
    assert title == "T" and sides["A"].overrides == {"talker.scheduler_mode": "sync"}
    path.write_text("a: {talker.schedular_mode: sync}\nb: {}\n")
    with pytest.raises(Exception, match=r"did you mean talker\.scheduler_mode"):
        read_experiment(path)
    path.write_text("a: {}\n")
    with pytest.raises(EvalError, match="two sides"):
        read_experiment(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--dataset", "nowhere"],
        ["run", "--load", "fast"],
        ["run", "--url", "ftp://x"],
        ["run", "--voices", "Nobody"],
        ["run", "--extra", "{", "--url", "http://127.0.0.1:9/v1"],
        ["run", "--set", "nonsense"],
        ["run", "--continue", "nowhere"],
        ["ab"],
        ["compare", "nowhere", "nowhere"],
        ["report", "nowhere"],
        ["fetch", "nothing"],
    ],
)
def test_bad_commands_end_with_2_and_a_sentence(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not list(tmp_path.rglob("requests.jsonl"))


# ---- verdicts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "limit", "expected"),
    [
        ((-0.01, 0.01), 0.02, "same"),
        ((0.0, 0.0), 0.02, "same"),
        ((0.03, 0.05), 0.02, "worse"),
        ((-0.06, -0.03), 0.02, "better"),
        ((-0.03, -0.01), 0.02, "no worse"),
        ((-0.9, 0.01), 0.02, "no worse"),
        ((0.01, 0.03), 0.02, "unclear"),
        ((-0.5, 0.5), 0.02, "unclear"),
        (None, 0.02, "unclear"),
    ],
)
def test_verdicts(bad, limit, expected):
    assert compare.verdict(bad, limit) == expected


def test_only_clones_are_compared_with_a_reference():
    assert clones({"kind": "engine", "task": "Base"}) and clones({"kind": "http", "voices": "clip"})
    assert not clones({"kind": "engine", "task": "CustomVoice"}) and not clones({"kind": "http", "voices": "none"})


# ---- with the judges ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_scores_of_speech_whose_words_and_speakers_are_known(known, tmp_path, capsys):
    """The server recites the bundled clips. One request asks for Daniel's words in Heart's voice: it must stand out."""
    voices = bundled_voices(["Heart", "Daniel", "Arctic"])
    lines = ["id\ttext\tvoice"] + [f"{n}\t{r.transcript}\t{n}" for n, r in voices.items()]
    lines.append(f"foreign\t{voices['Daniel'].transcript}\tHeart")
    (tmp_path / "known.tsv").write_text("\n".join(lines))
    recital = TargetSpec("server", server={"url": known.url, "voices": "name"})
    settings = RunSettings(
        dataset=str(tmp_path / "known.tsv"), voices=tuple(voices), variants={"": recital}, cells=("c2",),
        warmup=0, score=ScoreSettings(mos=("distillmos",)), keep_audio="worst",
    )  # fmt: skip
    (figure,) = Run.new(tmp_path / "run", settings).execute()["figures"]
    for rates in figure["wer"]["whisper-tiny.en"].values():
        assert rates["macro"] <= 0.05 and rates["coverage"] == 1
    (similarity,) = figure["similarity"].values()
    assert similarity["nearest_is_own"] == 0.75 and similarity["lowest"] < 0.75
    assert figure["mos"]["distillmos"]["mean"] > 4
    assert figure["checks"] == {"reference_leak": 1} or figure["checks"] == {}
    folder = RunFolder.open(tmp_path / "run")
    own = {s["utterance"]: s["similarity"]["GE2E (Resemblyzer)"] for s in folder.scores()}
    assert {row.utterance for row, _ in summary.worst(folder)} == {"Heart", "Daniel", "Arctic", "foreign"}
    assert own["Heart"]["whole"] > 0.99 and own["foreign"]["nearest"] == "Daniel" and own["foreign"]["margin"] < -0.2
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("data:audio/flac;base64,") == 4 and "GE2E (Resemblyzer)" in page and "whisper-tiny.en" in page
    findings = compare.compare(compare.Side.of(folder, ""), compare.Side.of(folder, ""))
    assert "worse" not in {f.verdict for f in findings} and any(f.name.startswith("WER") for f in findings)


@pytest.mark.slow
def test_the_real_engine_under_load(engine, tmp_path):
    """One, two and four at once on vLLM itself; random weights, so times and samples only."""
    from eval.targets import EngineTarget

    settings = RunSettings(
        dataset="english", limit=4, voices=("Heart", "Daniel"), cells=("c1", "c2", "c4"), warmup=1, frames=12,
        variants={"": TargetSpec("given")},
    )  # fmt: skip
    run = Run.new(tmp_path / "run", settings, open_target=lambda spec: EngineTarget(engine))
    result = run.execute()
    rows = [r for r in run.folder.rows() if not r.warmup]
    assert len(rows) == 12 and all(r.ok and r.samples == 12 * 1920 for r in rows)
    assert [f["load"]["peak_in_flight"] for f in result["figures"]] == [1, 2, 4]
    assert result["targets"][""]["weights"] == "random" and result["targets"][""]["config_hash"]
    assert any("Random weights" in note for note in result["footnotes"])
    pcm: dict[int, list[np.ndarray]] = {}
    for r in rows:
        pcm.setdefault(r.index, []).append(run.folder.read_pcm(r).astype(np.int32))
    apart = max(int(np.abs(other - one).max()) for one, *others in pcm.values() for other in others)
    print(f"largest difference between loads: {apart} of 32768")
    assert apart <= 8  # the same speech at every load, up to rounding (batch shapes differ)
