"""report.html: one self-contained page, made from what is in the run folder and nothing else."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any

import jinja2
import soundfile

from eval import plots, summary
from eval.errors import RunFolderError
from eval.folder import RunFolder
from eval.records import RequestRow

PLAYER_S = 40.0  # of a clip that goes into the page; a runaway of minutes does not
_PAGE = Path(__file__).with_name("report.html.j2")


def render(folder: RunFolder, figures: dict[str, Any], clips: int = summary.WORST) -> str:
    """The page of a run with its `clips` worst clips; `figures` is the content of summary.json."""
    rows, scores = folder.rows(), folder.scores()
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(_PAGE.read_text(encoding="utf-8"))
    return page.render(
        s=figures,
        scored=bool(scores),
        plots=_plots(figures["figures"], rows, scores),
        clips=[_clip(folder, row, score) for row, score in summary.worst(folder, clips)],
        wer_columns=_unique((asr, n) for f in figures["figures"] for asr, by in f["wer"].items() for n in by),
        encoders=_unique(name for f in figures["figures"] for name in f["similarity"]),
        mos_columns=_unique((name, v["model"]) for f in figures["figures"] for name, v in f["mos"].items()),
        describe=describe_target,
        ms=lambda d, key: "–" if d is None else _significant(d[key]),
        sec=lambda d, key: "–" if d is None else f"{d[key] / 1e3:.2f}",
        num=lambda v, digits: "–" if v is None else f"{v:.{digits}f}",
        pct=lambda v: "–" if v is None else f"{100 * v:.0f} %",
        pct2=lambda v: "–" if v is None else f"{100 * v:.2f} %",
        interval=_interval,
        num_interval=lambda ci: _small(f"{ci[0]:.2f} – {ci[1]:.2f}") if ci else "",
        pct_interval=lambda ci: _small(f"{100 * ci[0]:.1f} – {100 * ci[1]:.1f}") if ci else "",
    )


def _unique(items) -> list:
    return list(dict.fromkeys(items))


def _significant(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _small(text: str) -> jinja2.utils.markupsafe.Markup:
    return jinja2.utils.markupsafe.Markup(f'<span class="ci">{html.escape(text)}</span>')


def _interval(d: dict | None, key: str) -> str:
    if not d or key not in d["ci"]:
        return ""
    low, high = d["ci"][key]
    return _small(f"{_significant(low)} – {_significant(high)}")


def describe_target(target: dict[str, Any]) -> str:
    """One line on who was measured."""
    label = f"{target['label']}: " if target.get("label") else ""
    if target["kind"] == "http":
        parts = [target["url"], f"model {target['model']}", f"{target['transport']} {target['response_format']}"]
        return label + ", ".join(parts) + (f", extra {target['extra']}" if target["extra"] else "")
    parts = [f"{target.get('model')} ({target.get('task')}, {target.get('weights')} weights)"]
    parts.append(f"{target.get('device_name') or target.get('device')}, {target.get('dtype')}")
    parts.append(f"scheduler {target.get('scheduler_mode')}, settings {target.get('config_hash')}")
    return label + "; ".join(parts)


def _plots(figures: list[dict], rows: list[RequestRow], scores: list[dict]) -> dict[str, str]:
    busiest = max(figures, key=lambda f: f["load"]["peak_in_flight"], default=None)
    shown = [r for r in rows if busiest and r.variant == busiest["variant"] and r.cell == busiest["cell"]]
    session = min((r.session for r in shown if not r.warmup), default=0)
    title = f"{busiest['variant']} {busiest['title']}".strip() if busiest else ""
    return {
        "against_load": plots.against_load(figures),
        "distributions": plots.distributions(rows),
        "quality": plots.quality_against_load(figures, rows, scores) if scores else "",
        "timeline": plots.timeline([r for r in shown if r.session == session], title),
    }


# ---- clips -------------------------------------------------------------------------------------------------------


def _clip(folder: RunFolder, row: RequestRow, score: dict) -> dict[str, Any]:
    lines = []
    for asr, by_normalizer in score["wer"].items():
        for normalizer, errors in by_normalizer.items():
            rate = f"{100 * errors['rate']:.0f} %"
            marked = "(no speech)" if errors["no_speech"] else mark_differences(errors["differences"])
            lines.append({"label": f"Heard by {asr}, {normalizer}, {rate}", "html": marked})
    numbers = [f"{name} {one['whole']:.3f}" for name, one in score["similarity"].items() if one["whole"] is not None]
    numbers += [f"{name} {value:.2f}" for by_name in score["mos"].values() for name, value in by_name.items()]
    audio, cut = _player(folder, row)
    flags = score["checks"]["flags"] if score["checks"] else []
    if row.status != "ok":
        flags = [row.finish_reason or row.status, *flags]
    return {"row": row, "lines": lines, "numbers": "; ".join(numbers), "audio": audio, "cut": cut, "flags": flags}


def _player(folder: RunFolder, row: RequestRow) -> tuple[str, str]:
    """The clip as a data: address, and how many seconds of it when it is not all ("" otherwise)."""
    try:
        pcm = folder.read_pcm(row)
    except RunFolderError:
        return "", ""
    limit = round(PLAYER_S * row.sample_rate)
    out = io.BytesIO()
    soundfile.write(out, pcm[:limit], row.sample_rate, format="FLAC", subtype="PCM_16")
    data = base64.b64encode(out.getvalue()).decode()
    return f"data:audio/flac;base64,{data}", f"{PLAYER_S:g}" if pcm.size > limit else ""


def mark_differences(differences: list[dict]) -> str:
    """HTML of an alignment: asked-for words that are missing struck, words that are too many underlined."""
    parts = []
    for d in differences:
        wanted, heard = (html.escape(" ".join(d[side])) for side in ("reference", "hypothesis"))
        if d["kind"] == "equal":
            parts.append(heard)
        else:
            parts += [f"<del>{wanted}</del>"] if wanted else []
            parts += [f"<ins>{heard}</ins>"] if heard else []
    return " ".join(parts)
