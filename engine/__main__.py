"""The shell: `python -m engine say | serve | info | trace-tables`. Results on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import soundfile

from engine.config import EngineConfig
from engine.errors import ChorusError
from engine.request import SAMPLE_RATE, SamplingOverrides, SpeechRequest

DEFAULT_CONFIG = "configs/embedded.yaml"


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 the speech ended early or failed, 2 bad input."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "trace-tables":
        from engine.trace_tables import main as trace_tables

        return int(trace_tables(argv[1:]) or 0)
    if argv and argv[0] == "serve":
        from engine.server import main as serve

        return int(serve(argv[1:]) or 0)
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except ChorusError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of `--out -` left
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    say = commands.add_parser("say", help="speak a text to a file or to stdout")
    say.add_argument("text", help="what to say; - reads stdin")
    say.add_argument("--voice", help="reference clip (any audio file), or the name of a saved voice")
    say.add_argument("--ref-text", help="what the reference clip says; without it the x-vector alone is used")
    say.add_argument("--x-vector-only", action="store_true", help="ignore transcript and codes of the reference")
    say.add_argument("--speaker", help="preset speaker (CustomVoice)")
    say.add_argument("--instruct", help="style, or description of the voice (CustomVoice, VoiceDesign)")
    say.add_argument("--language", default="auto", help="name or ISO code; default: auto")
    say.add_argument("--seed", type=int, help="same seed, same audio; default: drawn and printed")
    say.add_argument("--max-frames", type=int, help="limit in frames of 80 ms; default: by the length of the text")
    for name, setting in SamplingOverrides.__dataclass_fields__.items():
        kind = _flag if "bool" in str(setting.type) else int if "int" in str(setting.type) else float
        say.add_argument(f"--{name.replace('_', '-')}", type=kind, help=argparse.SUPPRESS)
    say.add_argument("--out", default="out.wav", help="wav or flac file; - writes raw 16-bit PCM as it comes")
    _config_arguments(say)
    say.set_defaults(run=_say)
    info = commands.add_parser("info", help="load the engine and print what it is")
    _config_arguments(info)
    info.set_defaults(run=_info)
    commands.add_parser("serve", help="OpenAI-compatible speech API (see --help there)")
    commands.add_parser("trace-tables", help="tables and a plot from a trace file (see --help there)")
    return parser


def _flag(value: str) -> bool:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise argparse.ArgumentTypeError("true or false")


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default=DEFAULT_CONFIG, help="settings (YAML); default: %(default)s")
    parser.add_argument("--model", help="checkpoint folder, hub id, or dummy:1.7b-base")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one setting, as talker.max_num_seqs=4"
    )


def load_config(args: argparse.Namespace) -> EngineConfig:
    """The config that `--config`, `--model` and `--set` describe."""
    import yaml

    overrides = dict(item.partition("=")[::2] for item in args.set)
    parsed = {key: yaml.safe_load(value) for key, value in overrides.items()}
    return EngineConfig.load(args.config, **parsed, **({"model": args.model} if args.model else {}))


@contextmanager
def _stdout_to_stderr():
    """Libraries print to stdout while they load; it belongs to the result. Works below Python too."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield saved
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def _say(args: argparse.Namespace) -> int:
    from engine.engine import Engine
    from engine.info import describe

    text = sys.stdin.read() if args.text == "-" else args.text
    out = None if args.out == "-" else Path(args.out)
    if out is not None and out.suffix.lower() not in (".wav", ".flac"):
        print(f"error: --out {out}: give a .wav or .flac file, or - for raw PCM", file=sys.stderr)
        return 2
    config = load_config(args)
    with _stdout_to_stderr() as real_stdout:
        engine = Engine.from_config(config)
        try:
            print(describe(engine.info), file=sys.stderr)
            voice = args.voice
            if voice is None and engine.info.task == "Base":
                voice = engine.voices.list()[0].name
                print(f"no --voice given; using the bundled voice {voice}", file=sys.stderr)
            elif voice is not None and Path(voice).is_file():
                voice = engine.prepare_voice(Path(voice), transcript=args.ref_text)
            sampling = {name: getattr(args, name) for name in SamplingOverrides.__dataclass_fields__}
            request = SpeechRequest(
                text=text,
                voice=voice,
                speaker=args.speaker,
                instruct=args.instruct,
                language=args.language,
                x_vector_only=args.x_vector_only,
                seed=args.seed,
                max_frames=args.max_frames,
                sampling=SamplingOverrides(**sampling),
            )
            stream = engine.stream(request)
            pcm = []
            for chunk in stream:
                samples = np.round(chunk.pcm * 32767).astype("<i2")
                if out is None:
                    os.write(real_stdout, samples.tobytes())
                pcm.append(samples)
                seconds = (chunk.first_frame + chunk.frames) * 0.08
                print(f"\r{seconds:6.1f} s spoken", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
        finally:
            engine.close()
    result = stream.result
    assert result is not None
    if out is not None:
        soundfile.write(out, np.concatenate(pcm) if pcm else np.zeros(0, np.int16), SAMPLE_RATE, subtype="PCM_16")
    line = {
        "ttfa_ms": None if result.ttfa_ms is None else round(result.ttfa_ms, 1),
        "audio_s": round(result.audio_s, 2),
        "wall_s": round(result.wall_s, 3),
        "x_real_time": round(result.x_real_time, 2),
        "frames": result.frames,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "model": result.model,
        "weights": result.weights,
    }
    print(json.dumps(line), file=sys.stderr if out is None else sys.stdout)
    if result.detail:
        print(f"ended early: {result.detail}", file=sys.stderr)
    return 0 if result.ok else 1


def _info(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from engine.engine import Engine

    config = load_config(args)
    with _stdout_to_stderr():
        engine = Engine.from_config(config)
        info = asdict(engine.info)
        engine.close()
    print(json.dumps(info, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
