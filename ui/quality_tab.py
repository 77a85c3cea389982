"""The Quality tab: does it say what it should, in the right voice? Scores, clips to listen to, earlier runs."""

from __future__ import annotations

import html
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gradio as gr

from engine.errors import ChorusError
from eval import compare
from eval.datasets import BUNDLED, bundled_voices
from eval.errors import RunFolderError
from eval.folder import RunFolder
from eval.report import mark_differences
from eval.scoring import ScoreSettings
from eval.settings import RunSettings, TargetSpec
from ui.handle import EngineHandle
from ui.load_tab import state_html
from ui.run_manager import RunManager

UPLOADED = "my own list (below)"
SHOWN = 200  # rows of the table; all are in the report
COMPARE_HEAD = ["Load", "Figure", "A", "B", "Change", "95 % interval", "Verdict"]


class QualityTab:
    """`live` components are filled by `tick()`, as in the Engine tab."""

    def __init__(self, handle: EngineHandle, runs: RunManager) -> None:
        self.handle, self.runs = handle, runs
        self._table = ("", 0, "")  # job name, scored rows, HTML: made anew only when there is more to show
        with gr.Row(equal_height=False):
            with gr.Column(min_width=320, scale=2):
                self.dataset = gr.Dropdown([*BUNDLED, UPLOADED], value="english", label="Sentences",
                                           elem_id="quality-dataset")  # fmt: skip
                self.file = gr.File(label="Your list: .txt, a sentence a line; or .tsv with a column text",
                                    file_types=[".txt", ".tsv"], height=140, elem_id="quality-file")  # fmt: skip
                with gr.Row():
                    self.size = gr.Slider(1, 64, value=8, step=1, label="How many", elem_id="quality-size")
                    self.level = gr.Slider(1, 64, value=2, step=1, label="At once", elem_id="quality-level")
                names = list(bundled_voices())
                self.voices = gr.Dropdown(names, value=names[:4], multiselect=True, label="Voices, in turn",
                                          elem_id="quality-voices")  # fmt: skip
                with gr.Row():
                    self.asr = gr.Dropdown(
                        [("Whisper tiny.en", "tiny.en"), ("Whisper base", "base")],
                        value="tiny.en", label="Who listens", elem_id="quality-asr",
                    )  # fmt: skip
                    self.seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id="quality-seed")
                self.judges = gr.CheckboxGroup(
                    [("similarity: GE2E", "ge2e"), ("similarity: d-vector", "dvector"), ("DNSMOS", "dnsmos"),
                     ("DistillMOS", "distillmos")],
                    value=["ge2e", "distillmos"], label="Other judges", elem_id="quality-judges",
                )  # fmt: skip
                with gr.Row():
                    go = gr.Button("Run", variant="primary", elem_id="quality-run")
                    stop = gr.Button("Stop", variant="stop", elem_id="quality-stop")
                self.note = gr.Markdown(elem_id="quality-note")
            with gr.Column(min_width=320, scale=3):
                self.state = gr.HTML(elem_id="quality-state")
                self.table = gr.HTML(elem_id="quality-table")
        with gr.Accordion("Earlier runs", open=False, elem_id="quality-earlier"):
            with gr.Row():
                self.a = gr.Dropdown([], label="A", elem_id="quality-a", interactive=True)
                self.b = gr.Dropdown([], label="B", elem_id="quality-b", interactive=True)
                look = gr.Button("Look for runs", elem_id="quality-look")
                match = gr.Button("Compare", elem_id="quality-compare")
            self.links = gr.HTML(elem_id="quality-links")
            self.findings = gr.Dataframe(headers=COMPARE_HEAD, interactive=False, elem_id="quality-findings", wrap=True)
        inputs = [self.dataset, self.file, self.size, self.level, self.voices, self.asr, self.seed, self.judges]
        go.click(self._run, inputs, self.note)
        stop.click(self._stop, None, self.note)
        look.click(self._look, None, [self.a, self.b, self.links])
        match.click(self._compare, [self.a, self.b], [self.links, self.findings])

    @property
    def live(self) -> list[gr.components.Component]:
        return [self.state, self.table]

    def tick(self) -> list[Any]:
        job = self.runs.job
        if job is None or job.kind != "quality":
            return ["<p>Nothing is running. Every sentence is spoken, listened to by Whisper, and scored.</p>", ""]
        scores = job.run.folder.scores()
        if (job.name, len(scores)) != self._table[:2]:
            self._table = (job.name, len(scores), utterance_table(job.run.folder, scores))
        return [state_html(job), self._table[2]]

    def _run(self, dataset, file, size, level, voices, asr, seed, judges) -> str:
        try:
            source = dataset
            if dataset == UPLOADED:
                if not file:
                    return "⚠ Choose a file with your sentences first."
                source = _keep(Path(file))
            settings = RunSettings(
                dataset=source,
                limit=int(size),
                voices=tuple(voices),
                variants={"": TargetSpec("given", "")},
                cells=(f"c{int(level)}",),
                warmup=1,
                seed=int(seed),
                score=ScoreSettings(
                    asr=(asr,),
                    speakers=tuple(j for j in ("ge2e", "dvector") if j in judges),
                    mos=tuple(j for j in ("dnsmos", "distillmos") if j in judges),
                ),
                title=f"Quality, {dataset if dataset != UPLOADED else Path(file).name}, {int(level)} at once",
            )
            self.runs.start("quality", settings)
        except (ChorusError, TypeError) as error:
            return f"⚠ {error}"
        return "Started. It goes on when this page is closed."

    def _stop(self) -> str:
        self.runs.stop()
        return "Stopping after the requests that are running."

    def _look(self) -> list[Any]:
        names = self.runs.earlier()
        newest = names[0] if names else None
        older = names[1] if len(names) > 1 else newest
        return [gr.update(choices=names, value=older), gr.update(choices=names, value=newest), report_links(names[:20])]

    def _compare(self, a: str | None, b: str | None) -> list[Any]:
        try:
            if not a or not b:
                raise RunFolderError("choose two runs", field="run")
            findings = self.runs.compare(a, b)
        except ChorusError as error:
            return [f"<p>⚠ {html.escape(error.message)}</p>", []]
        return [report_links([a, b]), [comparison_row(f) for f in findings]]


def comparison_row(f: compare.Finding) -> list[str]:
    form = "{:.3f}" if f.kind == "ratio" else "{:+.4f}"
    spread = "–" if f.interval is None else " … ".join(form.format(v) for v in f.interval)
    change = ("× " if f.kind == "ratio" else "") + form.format(f.change)
    return [f.cell, f.name, f"{f.a:.4g}", f"{f.b:.4g}", change, spread, f.verdict]


def report_links(names: list[str]) -> str:
    rows = [
        f'<a href="/chorus/runs/{html.escape(n)}/report.html" target="_blank">{html.escape(n)}</a>'
        for n in dict.fromkeys(names)
    ]
    return "<p>" + " · ".join(rows) + "</p>" if rows else "<p>No runs yet.</p>"


def utterance_table(folder: RunFolder, scores: list[dict]) -> str:
    """Every scored clip with a player, the transcript with its differences marked, and its figures."""
    if not scores:
        return ""
    rows = {r.id: r for r in folder.rows()}
    name = html.escape(folder.path.name)
    lines = []
    for score in scores[-SHOWN:][::-1]:
        row = rows.get(score["id"])
        if row is None:
            continue
        heard, rate = "", ""
        for by_normalizer in score["wer"].values():
            errors = list(by_normalizer.values())[-1]
            heard = "(no speech)" if errors["no_speech"] else mark_differences(errors["differences"])
            rate = f"{100 * errors['rate']:.0f} %"
        cosines = ", ".join(f"{one['whole']:.2f}" for one in score["similarity"].values() if one["whole"] is not None)
        opinions = ", ".join(
            f"{k} {v:.1f}" for by in score["mos"].values() for k, v in by.items() if k in ("dnsmos_ovrl", "distillmos")
        )
        flags = ", ".join(score["checks"]["flags"]).replace("_", " ") if score["checks"] else ""
        player = (
            f'<audio controls preload="none" aria-label="{html.escape(row.id)}" '
            f'src="/chorus/runs/{name}/audio/{html.escape(row.id)}"></audio>'
        )
        lines.append(
            f"<tr><td>{html.escape(row.text)}<br><small>heard: {heard}</small><br>{player}</td>"
            f"<td>{html.escape(row.voice)}</td><td>{rate}</td><td>{cosines}</td><td>{opinions}</td><td>{flags}</td></tr>"
        )
    names = ("Asked, and heard", "Voice", "WER", "Cosine", "MOS", "Checks")
    head = "".join(f"<th>{n}</th>" for n in names)
    body = "".join(lines)
    return f'<div class="ch-clips"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _keep(upload: Path) -> str:
    """A copy of an upload that lasts as long as the run: Gradio clears its own."""
    folder = Path(tempfile.mkdtemp(prefix="chorus-list-"))
    return str(shutil.copy(upload, folder / upload.name))
