"""The engine in a child process, behind the interface of `Engine`.

Models and web server share no interpreter lock, a crash of the models is not a crash of the app, and other settings
are a restart of the child. The parent loads neither torch nor vLLM.

    engine = EngineProcess(EngineConfig.load("configs/embedded.yaml"))
    for chunk in engine.stream(SpeechRequest("Hello there.", voice="Emma")): ...

A child that dies takes its requests with it (`EngineFailed`) and is started again; one that dies three times before
it was ever ready is given up (`state` "failed").
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import numpy as np

from engine.audio import Audio
from engine.checkpoint import Checkpoint
from engine.config import ROOT, EngineConfig
from engine.errors import ChorusError, ConfigError, EngineClosed, EngineFailed, InvalidRequest
from engine.info import EngineInfo
from engine.process_handle import CLOSE_S, POLL_S, ChildHandle
from engine.process_pending import Pending
from engine.request import SpeechRequest
from engine.stream import SpeechStream
from engine.voices import VoiceLibrary, VoicePrompt, prepare_audio

State = Literal["starting", "ready", "restarting", "failed", "closed"]

GIVE_UP_AFTER = 3  # deaths in a row without having been ready
METRICS_S = 2.0


class EngineProcess:
    """See the module's docstring. Safe to call from many threads."""

    def __init__(self, config: EngineConfig | str | Path | None = None, *, wait: bool = True, **overrides: Any) -> None:
        """Start the child.

        Args:
            config: settings, or a YAML file of them; `overrides` as in `EngineConfig.load`.
            wait: return when requests are served; else at once, see `state` and `wait_ready`.

        Raises:
            ConfigError, CheckpointError, EngineFailed: with `wait`, why it did not start.
        """
        if not isinstance(config, EngineConfig):
            config = EngineConfig.load(config, **overrides)
        elif overrides:
            config = config.replace(**overrides)
        self.config = config
        self.last_error: str | None = None  # why the last child ended, for people
        self.restarts = 0
        self._state: State = "starting"
        self._info: EngineInfo | None = None
        self._changed = threading.Condition(threading.RLock())
        self._child: ChildHandle | None = None
        self._spare: ChildHandle | None = None  # has its imports done, waits for settings
        self._preparing = False
        self._fault: ChorusError | None = None  # why the state is "failed"
        self._wanted: EngineConfig | None = config  # settings to start next; None: nothing is to be started
        self._fallback: EngineConfig | None = None  # settings that worked before a restart with others
        self._pending = Pending()
        self.voices = self._library("")
        self._supervisor = threading.Thread(target=self._supervise, name="chorus-supervisor", daemon=True)
        self._supervisor.start()
        _close_at_exit(self)
        if wait:
            try:
                self.wait_ready()
            except ChorusError:
                self.close()
                raise

    # ---- the engine's interface --------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._state

    @property
    def failure(self) -> str | None:
        """Why requests are no longer served, or None; as in `Engine`."""
        return self.last_error if self._state == "failed" else None

    @property
    def info(self) -> EngineInfo:
        """Raises EngineClosed before the first start has come so far."""
        info = self._info
        if info is None:
            raise self._not_ready()
        return info

    def stream(self, request: SpeechRequest) -> SpeechStream:
        """As `Engine.stream`; EngineClosed while there is no ready child."""
        return self.submit(request).result()

    def submit(self, request: SpeechRequest) -> Future[SpeechStream]:
        """`stream` for callers that must not wait, event loops above all: its stream or its error comes later.

        The future must not be cancelled. Raises EngineClosed at once while there is no ready child.
        """

        def accepted(reply: tuple[str, int, tuple[str, ...], int]) -> SpeechStream:
            text, seed, parts, tokens = reply
            return self._pending.stream(SpeechStream(request, text, seed, self.cancel, parts, tokens))

        return self._call("stream", request, accepted)

    def cancel(self, request_id: str) -> bool:
        child = self._child
        if child is None or request_id not in self._pending:
            return False
        return child.send("cancel", request_id)

    def prepare_voice(
        self,
        audio: str | Path | bytes | np.ndarray | Audio,
        sample_rate: int | None = None,
        transcript: str | None = None,
    ) -> VoicePrompt:
        """As `Engine.prepare_voice`: decoded here, encoded by the child, cached here."""
        if self.info.task != "Base":
            raise InvalidRequest(f"a {self.info.task} checkpoint cannot clone a voice", field="voice")
        return self.voices.prepare(prepare_audio(audio, sample_rate), transcript)

    def metrics(self) -> dict[str, float]:
        """The child's numbers and `restarts`; only the latter while there is no ready child."""
        own = {"restarts": float(self.restarts)}
        try:
            return self._call("metrics", None).result(timeout=METRICS_S) | own
        except (ChorusError, TimeoutError):
            return own

    def close(self) -> None:
        """End every request and the child."""
        with self._changed:
            if self._state == "closed":
                return
            self._state, self._wanted = "closed", None
            child = self._child
            self._changed.notify_all()
        if child is not None:
            child.stop()
        self._supervisor.join(timeout=CLOSE_S)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- life of the child -------------------------------------------------------------------------------------

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return when requests are served.

        Raises:
            ChorusError: the error that keeps it from starting.
            EngineClosed: closed, or not ready after `timeout_s`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._state in ("ready", "failed", "closed"), timeout_s)
            if self._state == "failed":
                raise self._fault or EngineFailed(self.last_error or "the engine did not start")
            if self._state != "ready":
                raise self._not_ready()

    def restart(self, config: EngineConfig) -> None:
        """Run with other settings. Returns when they are served.

        The old child serves until the new one has its imports done; from then on requests get EngineClosed, and
        those that still run end with it.

        Raises:
            CheckpointError, ConfigError: no such model, or settings that cannot work here; nothing was stopped.
            ChorusError: the new settings do not start; the old ones are being started again.
            EngineClosed: closed, or another restart is going on.
        """
        Checkpoint.open(config.model_path, config.load_format)
        with self._changed:
            if self._preparing or self._state not in ("ready", "failed"):
                raise self._not_ready()
            self._preparing = True
        try:
            spare = self._prepare(config) if self._state == "ready" else None
            self._exchange(config, spare)
            with self._changed:
                self._changed.wait_for(lambda: self._state in ("ready", "failed", "closed") or self._fault is not None)
                fault, self._fault = self._fault, None
                if fault is not None:
                    raise fault
                if self._state != "ready":
                    raise self._not_ready()
        finally:
            self._preparing = False

    def _prepare(self, config: EngineConfig) -> ChildHandle | None:
        """Imports take most of a start; the old child goes on serving meanwhile."""
        spare = ChildHandle()
        if spare.prepare(config, needed=lambda: self._state == "ready"):
            return spare
        spare.kill()
        if spare.error is not None:
            raise spare.error
        return None

    def _exchange(self, config: EngineConfig, spare: ChildHandle | None) -> None:
        with self._changed:
            if self._state == "closed":
                if spare is not None:
                    spare.kill()
                raise self._not_ready()
            self._fallback = self.config if self._info is not None else None
            self._state, self._wanted, self._spare, self._fault = "restarting", config, spare, None
            child = self._child
            self._changed.notify_all()
        if child is not None:
            child.stop()

    def _supervise(self) -> None:
        deaths = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None or self._state == "closed")
                if self._state == "closed":
                    return
                config, self._wanted = self._wanted, None
                assert config is not None
                try:
                    child, self._spare = self._spare or ChildHandle(), None
                except OSError as error:
                    self.last_error = f"no process could be started: {error}"
                    self._state, self._fault = "failed", EngineFailed(self.last_error)
                    self._changed.notify_all()
                    continue
                self._child = child
            child.start(config)
            self._serve(child)
            child.kill()
            child.connection.close()
            with self._changed:
                self._child = None
                if self._state == "closed":
                    self._pending.abandon(EngineClosed("the engine was closed"))
                    return
                deaths = 0 if child.was_ready else deaths + 1
                self._after(child, deaths)
                self._changed.notify_all()
            if not child.was_ready and not child.stopping:
                time.sleep(min(2.0, 0.25 * deaths))

    def _serve(self, child: ChildHandle) -> None:
        """Read what the child sends until it ends."""
        try:
            while True:
                if child.connection.poll(POLL_S):
                    self._take(child, child.connection.recv())
                elif child.process.poll() is not None:
                    return
        except (EOFError, OSError):
            return
        except Exception as error:  # a message nobody can read: the child is of no use
            child.error = EngineFailed(f"the engine process sent something unreadable ({error})")

    def _take(self, child: ChildHandle, message: tuple) -> None:
        if self._pending.take(message):
            return
        kind = message[0]
        if kind == "ready":
            with self._changed:
                if child.stopping:
                    return
                child.was_ready = True
                self.config, self._info, self._fallback = child.config, message[1], None
                self.voices = self._library(self._info.checkpoint_id)
                self._state = "ready"
                self._changed.notify_all()
        elif kind == "failed":
            child.error = message[1]

    def _after(self, child: ChildHandle, deaths: int) -> None:
        """The child is gone: end what it had, and decide what comes next. Called with the lock."""
        if child.stopping:
            self._pending.abandon(
                EngineClosed("the engine is restarting with other settings; send the request again shortly")
            )
            return
        code = child.process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        why = child.error.message if child.error else f"the engine process {how}"
        self.last_error = why
        self._pending.abandon(EngineFailed(f"{why} while this request ran; send it again when the engine is back"))
        # Bad settings stay bad; anything else may have been an accident.
        hopeless = isinstance(child.error, ConfigError) or (child.error is not None and not child.was_ready)
        fault = child.error or EngineFailed(f"{why} before it was ready")
        if not child.was_ready and self._fallback is not None:
            self._wanted, self._fallback, self._fault = self._fallback, None, fault
        elif hopeless or deaths >= GIVE_UP_AFTER:
            self._state, self._fault = "failed", fault
        else:
            if child.was_ready:
                self.restarts += 1
                self._state = "restarting"
            self._wanted = child.config

    # ---- calls -------------------------------------------------------------------------------------------------

    def _call(self, name: str, argument: Any, accept: Callable[[Any], Any] = lambda value: value) -> Future:
        """Ask the child; `accept` turns its answer into the result, on the thread that reads."""
        with self._changed:
            child = self._child
            if self._state != "ready" or child is None:
                raise self._not_ready()
            number, future = self._pending.call(accept)
        # Should this not arrive, the reader sees the same end of the connection and fails the call with its cause.
        child.send("call", number, name, argument)
        return future

    def _not_ready(self) -> EngineClosed:
        words = {
            "starting": "the engine is starting; try again when it is ready",
            "restarting": "the engine is restarting; try again when it is ready",
            "failed": f"the engine has failed ({self.last_error}); restart it",
            "closed": "the engine is closed; start it again",
            "ready": "the engine is about to restart with other settings; try again shortly",
        }
        return EngineClosed(words.get(self._state, "the engine is not ready; try again shortly"))

    def _library(self, checkpoint_id: str) -> VoiceLibrary:
        folder = Path(self.config.voices_dir).expanduser()
        folder = folder if folder.is_absolute() else ROOT / folder
        return VoiceLibrary(folder, encode=self._encode, checkpoint_id=checkpoint_id)

    def _encode(self, audio: Audio) -> tuple[np.ndarray, np.ndarray | None]:
        return self._call("encode", audio).result()


def _close_at_exit(engine: EngineProcess) -> None:
    """The child notices the parent's end by itself; this gives it time to close in good order."""
    kept = weakref.ref(engine)

    def close() -> None:
        if (alive := kept()) is not None:
            alive.close()

    atexit.register(close)
