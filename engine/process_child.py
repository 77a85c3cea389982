"""The engine's side of `EngineProcess`: `python -m engine.process_child FD`.

FD is one end of a socket pair. Messages are pickled tuples, the first element names them:

    parent → child   ("prepare", dict) ("config", dict) ("call", number, name, argument)
                     ("cancel", request id) ("close",)
    child → parent   ("prepared",) ("ready", EngineInfo) ("failed", error)
                     ("reply", number, value) ("raise", number, error)
                     ("chunk", AudioChunk) ("end", SpeechResult) ("broken", request id, error)
                     ("position", request id, place in the queue)

One thread writes, so that the engine's own thread never waits for the parent to read.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from engine.errors import ChorusError, EngineFailed
from engine.stream import SpeechStream

WATCH_S = 0.25  # how often the parent's life and the engine's health are looked at
CALLERS = 4  # voices encoded, and other calls that take long, at the same time


def typed(error: BaseException) -> ChorusError:
    """Any error as one that the parent can read without this process's libraries."""
    return error if isinstance(error, ChorusError) else ChorusError(f"{type(error).__name__}: {error}")


class Outbox:
    """Sends messages and the chunks of streams, in order, from a thread of its own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._items: queue.SimpleQueue[tuple | SpeechStream | None] = queue.SimpleQueue()
        self._ended: set[str] = set()
        self._positions: dict[str, int] = {}  # of streams in the queue, as last sent
        self._thread = threading.Thread(target=self._run, name="chorus-outbox", daemon=True)
        self._thread.start()

    def send(self, *message: Any) -> None:
        self._items.put(message)

    def follow(self, stream: SpeechStream) -> None:
        """Send the stream's chunks and its end as they come."""
        stream.on_item(lambda: self._items.put(stream))

    def close(self) -> None:
        """Returns when everything is sent."""
        self._items.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while (item := self._items.get()) is not None:
                if isinstance(item, SpeechStream):
                    self._drain(item)
                else:
                    self._connection.send(item)
        except (OSError, ValueError):  # nobody reads any more
            os._exit(0)

    def _drain(self, stream: SpeechStream) -> None:
        # One notification for each item, but the first may stand for several: the rest finds nothing.
        if stream.result is not None or stream.id in self._ended:
            return
        if (position := stream.position) != self._positions.get(stream.id, 0):
            self._positions[stream.id] = position
            if not position:
                del self._positions[stream.id]
            self._connection.send(("position", stream.id, position))
        try:
            while (chunk := stream.try_next()) is not None:
                self._connection.send(("chunk", chunk))
        except StopIteration:
            self._positions.pop(stream.id, None)
            self._connection.send(("end", stream.result))
        except ChorusError as error:
            self._positions.pop(stream.id, None)
            if stream.result is not None:  # the parent's stream makes the same error of the same result
                self._connection.send(("end", stream.result))
            else:
                self._ended.add(stream.id)
                self._connection.send(("broken", stream.id, error))


class Child:
    """Serves the parent's messages until it closes or is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outbox = Outbox(connection)
        self._engine: Any = None
        self._callers = ThreadPoolExecutor(CALLERS, thread_name_prefix="chorus-call")

    def run(self) -> int:
        threading.Thread(target=self._watch, args=(os.getppid(),), name="chorus-watch", daemon=True).start()
        try:
            if (message := self._connection.recv())[0] == "prepare":
                _limit_threads(message[1])
                _import_everything(message[1])
                self._outbox.send("prepared")
                message = self._connection.recv()
            _limit_threads(message[1])
            self._start(message[1])
        except EOFError:
            return 0
        except BaseException as error:
            if not isinstance(error, ChorusError):
                traceback.print_exc()
            self._outbox.send("failed", typed(error))
            self._outbox.close()
            return 1
        self._outbox.send("ready", self._engine.info)
        try:
            while (message := self._connection.recv())[0] != "close":
                self._take(message)
        except (EOFError, OSError):
            pass
        self._engine.close()
        self._outbox.close()
        return 0

    def _start(self, settings: dict[str, Any]) -> None:
        from engine.checkpoint import Checkpoint
        from engine.config import EngineConfig

        config = EngineConfig.from_dict(settings)
        Checkpoint.open(config.model_path, config.load_format)  # a missing model is told before torch is loaded

        from engine.engine import Engine
        from engine.warmup import warm_up

        engine = Engine(config)
        warm_up(engine)
        self._engine = engine

    def _take(self, message: tuple) -> None:
        if message[0] == "cancel":
            self._engine.cancel(message[1])
        elif message[2] == "metrics" or (message[2] == "stream" and self._at_once(message[3])):
            # Cheap, and asked for when everything else is slow. A request that is laid out by the thread that reads it
            # waits for no other thread, nor for those before it to get their turns (of 64 at once on two cores, half
            # came to the engine within 120 ms, and within 270 when a pool of four threads did it).
            self._call(*message[1:])
        else:
            self._callers.submit(self._call, *message[1:])

    def _at_once(self, request: Any) -> bool:
        try:
            return self._engine.accepts_at_once(request)
        except Exception:  # a request that is no request: `stream` says what is wrong with it
            return False

    def _call(self, number: int, name: str, argument: Any) -> None:
        try:
            if name == "stream":
                stream = self._engine.stream(argument)
                made = stream.text, stream.seed, stream.parts, stream.input_tokens
                self._outbox.send("reply", number, made)  # before its first chunk
                self._outbox.follow(stream)
            elif name == "encode":
                self._outbox.send("reply", number, self._engine._encode_voice(argument))
            elif name == "metrics":
                self._outbox.send("reply", number, self._engine.metrics())
            else:
                raise ChorusError(f"no call {name!r}")
        except BaseException as error:
            if not isinstance(error, ChorusError):
                traceback.print_exc()
            self._outbox.send("raise", number, typed(error))

    def _watch(self, parent: int) -> None:
        """Die with the parent, whatever this process is busy with; and report an engine that broke inside."""
        while True:
            time.sleep(WATCH_S)
            if os.getppid() != parent:
                os._exit(0)
            failure = getattr(self._engine, "failure", None)
            if failure:
                self._outbox.send("failed", EngineFailed(str(failure)))
                self._outbox.close()
                os._exit(1)


def _limit_threads(settings: dict[str, Any]) -> None:
    """Before torch and vLLM are loaded: each brings its own OpenMP, and only the environment reaches both."""
    if settings.get("threads") and "torch" not in sys.modules:
        os.environ.setdefault("OMP_NUM_THREADS", str(settings["threads"]))


def _import_everything(settings: dict[str, Any]) -> None:
    """What a start imports anyway, most of its time; and the checks that need no model. Raises ConfigError."""
    from engine import wiring
    from engine.config import EngineConfig
    from engine.talker import compat

    config = EngineConfig.from_dict(settings)
    compat.prepare_environment(wiring.talker_settings(config, wiring.device(config)))

    import engine.engine
    import engine.talker.model  # noqa: F401


def main(argv: list[str]) -> int:
    logging.basicConfig(format="%(name)s: %(message)s")  # warnings and worse, to stderr
    logging.getLogger("chorus").setLevel(logging.INFO)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who closes this process
    fd = int(argv[1])
    os.set_inheritable(fd, False)
    status = Child(Connection(fd)).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # libraries' threads and exit handlers have nothing left to do


if __name__ == "__main__":
    main(sys.argv)
