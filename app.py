"""The web page: `python app.py [--host 0.0.0.0] [--port 7860] [--model FOLDER] [--https] [--password WORD]`."""

from __future__ import annotations

import argparse
import os
import sys

# Before Gradio or a hub client is imported: the page reports to nobody.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import uvicorn

from engine import pauses
from engine.config import EngineConfig
from engine.errors import ChorusError
from engine.process import EngineProcess
from ui import serve
from ui.handle import EngineHandle

END_S = 3  # after Ctrl+C; open pages would hold the server up for ever


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="app.py", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 opens the page to the network")
    parser.add_argument("--port", type=int, default=7860)
    parser.add_argument("--config", default="configs/embedded.yaml", help="settings (YAML); default: %(default)s")
    parser.add_argument("--model", help="checkpoint folder, hub id, or dummy:1.7b-base (random weights)")
    parser.add_argument("--https", action="store_true", help="self-signed certificate; remote microphones need it")
    parser.add_argument("--password", help="asked for once by the browser (any user name)")
    args = parser.parse_args(argv)
    if args.password == "":  # of an unset variable, say: it must not open the page to everyone
        parser.error("--password is empty: give a word, or leave it out")
    try:
        config = EngineConfig.load(args.config, **({"model": args.model} if args.model else {}))
    except ChorusError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    handle = EngineHandle(EngineProcess(config, wait=False))
    app = serve.create(handle, password=args.password, https=args.https)
    pauses.keep_short()
    tls = (
        dict(zip(("ssl_certfile", "ssl_keyfile"), map(str, serve.self_signed(args.host)), strict=True))
        if args.https
        else {}
    )
    print(f"Chorus: {'https' if args.https else 'http'}://{args.host}:{args.port}", file=sys.stderr)
    try:
        uvicorn.run(app, host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=END_S, **tls)
    finally:
        handle.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
