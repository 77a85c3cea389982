"""The talker: prompts in, frames of codes out, many requests at once. vLLM runs inside."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from engine.cuda_graphs import CudaCapture, captures_on
from engine.errors import ChorusError, ConfigError, EngineClosed, EngineFailed, InvalidRequest
from engine.talker import compat, derived_config, host_work, weights
from engine.talker.frames import PinnedReports
from engine.talker.geometry import TalkerGeometry
from engine.talker.settings import TalkerSettings
from engine.talker.slots import PromptRows, SlotOptions, SlotPool

LONG_PREFILL = 512  # rows from which a step on the CPU uses all threads


class Weights(Protocol):
    """What the talker asks of a checkpoint (engine/checkpoint.py)."""

    @property
    def config(self) -> dict[str, Any]: ...

    def tensors(self, prefix: str = "") -> Iterable[tuple[str, torch.Tensor]]: ...


@dataclass(frozen=True)
class TalkerFrames:
    """Frames of one request that became readable.

    Attributes:
        codes: int64 [n, G]; n may be 0 when only the end is told.
        finish: None while it goes on, "stop" at the model's own end (which carries no codes), "length" after
            max_frames frames.
    """

    id: str
    first_frame: int
    codes: np.ndarray
    finish: str | None


@dataclass
class _Running:
    id: str
    slot: int
    ticket: int
    length: int  # rows of the prompt
    frames: int = 0  # handed out
    told: int = 0  # frames vLLM has confirmed
    finish: str | None = None


class Talker:
    """vLLM in this process, driven by one thread.

    Raises (constructor):
        ConfigError: a setting that cannot work; `field` names it.
        CheckpointError: weights or config that do not fit.
    """

    def __init__(self, settings: TalkerSettings, checkpoint: Weights) -> None:
        self.settings = settings
        self.geometry = TalkerGeometry.from_config(checkpoint.config)
        self._client: Any = None
        self._running: dict[str, _Running] = {}
        self._by_ticket: dict[int, _Running] = {}
        self._ticket = 0
        self._waits = host_work.Waits()
        self._no_frames = np.empty((0, self.geometry.groups), np.int64)
        self._stream = torch.cuda.Stream(priority=-1) if settings.goes_first else None
        self.self_check: list[Any] = []  # selfcheck.Comparison of every graph, where there are graphs
        compat.kv_cache_bytes(self.geometry, settings)  # refuses before anything is imported or made
        compat.prepare_environment(settings)
        try:
            with self._on_stream(), captures_on(self._stream):
                self._start(checkpoint)
        except BaseException:
            self.close()
            raise

    def _start(self, checkpoint: Weights) -> None:
        from engine.talker.model import ARCHITECTURE, TalkerModel

        settings = self.settings

        def fill(model: TalkerModel) -> None:
            if "dummy" in (settings.load_format, getattr(checkpoint, "load_format", "auto")):
                weights.fill_random(model)
            else:
                weights.load(model, checkpoint.tensors("talker."))
            model.finish_loading()

        compat.register(ARCHITECTURE, TalkerModel, fill)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        # Only read while vLLM starts; gone by then, a process that is killed leaves nothing behind.
        with tempfile.TemporaryDirectory(prefix="chorus-talker-") as folder:
            derived_config.write(Path(folder), checkpoint.config, self.geometry, settings, ARCHITECTURE)
            try:
                self._client = compat.start(compat.engine_config(Path(folder), self.geometry, settings), settings)
            except (ChorusError, KeyboardInterrupt):
                raise
            except Exception as error:
                raise EngineFailed(f"vLLM did not start: {type(error).__name__}: {error}") from error
        host_work.spare_allocations(self._client)
        self.model: TalkerModel = compat.model(self._client)
        self._pool = SlotPool(settings.slot_count)
        if self.model.head.is_cuda:
            self.model.reports = PinnedReports(self.model.step.report)  # type: ignore[assignment]
            self.model.reports.enabled = True  # type: ignore[attr-defined]
        if self.model.after is not None and settings.placement == "own_graph":
            self.model.after.capture(settings.predictor_sizes, CudaCapture())
            self.model.after.direct = True
        try:
            self._warm_up()
            if self.model.probe is not None and settings.cudagraph == "full":
                from engine.talker import selfcheck

                self.self_check = selfcheck.run(self)
        except EngineFailed as error:
            if settings.device == "cpu" and settings.scheduler_mode == "async":
                raise ConfigError(
                    f"vLLM's CPU platform has no async scheduling, and this version could not be brought to it "
                    f"({error}); set talker.scheduler_mode to sync",
                    field="talker.scheduler_mode",
                ) from error
            raise

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Everything that runs or writes what a step reads happens on one stream, in the order of the calls."""
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def _warm_up(self) -> None:
        """A real request, so that compiled kernels and graphs exist before the first listener waits for them."""
        width = self.geometry.talker.hidden
        rows = torch.zeros(min(32, self.settings.max_prompt - 1, self.settings.max_model_len - 2), width)
        prompt = PromptRows(rows, rows[:0], rows[0])
        self.add("warm-up", prompt, SlotOptions(seed=0, max_frames=min(2, self.settings.max_frames)))
        while self.busy:
            self.step()

    # ---- requests ---------------------------------------------------------------------------------------------

    def serve_while_waiting(self, serve: Callable[[], None]) -> None:
        """Have `serve`, which may call `add`, called again and again while `step` waits for a GPU."""
        self._waits = host_work.serve_while_waiting(self._client, serve)

    @property
    def waited_s(self) -> float:
        """How long `step` has waited for a GPU until now, with what was served meanwhile. Where steps run ahead: the
        rest of a step is the host's own work, and where this stays near 0 the host is what limits the speed."""
        return self._waits.seconds

    @property
    def free_slots(self) -> int:
        return len(self._pool)

    @property
    def busy(self) -> bool:
        """Whether a step would do something: requests running, or ended ones that vLLM has yet to forget."""
        return self._client is not None and (bool(self._running) or compat.in_flight(self._client))

    @property
    def free_kv_blocks(self) -> int:
        return compat.free_blocks(self._client)

    @property
    def placement_stats(self) -> dict[str, int]:
        """Steps whose codes were made after them: in graphs, eagerly, rows added to fill graphs. Empty: inside."""
        after = self.model.after
        return dict(after.stats) if after is not None else {}

    def check(self, prompt: PromptRows, options: SlotOptions) -> None:
        """What `add` would refuse whatever else is running. Callable from any thread.

        Raises:
            InvalidRequest: the prompt or an option does not fit this engine.
        """
        self.model.slots.check(prompt, options)
        length = prompt.length
        if length + options.max_frames > self.settings.max_model_len:
            raise InvalidRequest(
                f"{length} prompt rows and {options.max_frames} frames exceed talker.max_model_len = "
                f"{self.settings.max_model_len}; lower max_frames or shorten the prompt",
                field="max_frames",
            )

    def add(self, id: str, prompt: PromptRows, options: SlotOptions, *, checked: bool = False) -> None:
        """Take a request in; its frames come out of `step`. `checked`: it has passed `check`.

        Raises:
            SlotsFull: no slot is free.
            InvalidRequest: the prompt or an option does not fit this engine; nothing was spent.
        """
        if self._client is None:
            raise EngineClosed("the talker is closed")
        if id in self._running:
            raise InvalidRequest(f"a request {id!r} is already running", field="id")
        if not checked:
            self.check(prompt, options)
        length = prompt.length
        slot = self._pool.take()
        self._ticket += 1
        entry = _Running(id, slot, self._ticket, length)
        with torch.inference_mode(), self._on_stream():
            self.model.slots.write(slot, entry.ticket, prompt, options)
        # vLLM knows the request by its ticket: an id may be used again while vLLM still forgets its first use
        self._client.add_request(
            compat.request(str(entry.ticket), slot, length, options.max_frames, self.model.end_token)
        )
        self._running[id] = self._by_ticket[entry.ticket] = entry

    def abort(self, id: str) -> bool:
        """Forget a request; its slot and KV blocks are free at once. False when it is not running.

        A step in flight may still write into the slot. It runs before whatever a later `add` queues, so the next
        owner finds its own values, and reports of the old ticket match nobody.
        """
        entry = self._running.get(id)
        if entry is None:
            return False
        self._client.abort_requests([str(entry.ticket)])
        self._release(entry)
        return True

    def _release(self, entry: _Running) -> None:
        del self._running[entry.id], self._by_ticket[entry.ticket]
        self._pool.give(entry.slot)

    def step(self) -> list[TalkerFrames]:
        """Run one step of vLLM and hand out the frames that became readable.

        With async scheduling a frame may be handed out before vLLM has confirmed it, and the end follows alone.

        Raises:
            EngineFailed: vLLM broke; the talker is of no use any more.
        """
        if self._client is None:
            raise EngineClosed("the talker is closed")
        if not self.busy:
            return []
        try:
            with self._threads(), self._on_stream():
                outputs = self._client.get_output().outputs
        except ChorusError:
            raise
        except Exception as error:
            raise EngineFailed(f"the talker's step failed: {type(error).__name__}: {error}") from error
        for output in outputs:
            entry = self._by_ticket.get(int(output.request_id))
            if entry is None:
                continue
            ended = self.model.end_token in output.new_token_ids
            entry.told += len(output.new_token_ids) - ended
            if output.finish_reason is not None:
                entry.finish = "stop" if ended else "length"
        return self._hand_out()

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """One thread for a step on the CPU unless it has a long prefill: short loops are not worth a barrier each, and
        where other programs want the cores, every barrier waits for whoever holds one (ten times slower, measured)."""
        threads = torch.get_num_threads()
        new = sum(entry.length for entry in self._running.values() if not entry.told)
        if threads == 1 or self.model.head.is_cuda or new > LONG_PREFILL:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def _hand_out(self) -> list[TalkerFrames]:
        codes: dict[int, list[np.ndarray]] = {}  # by ticket, [1, G] each
        ended = [entry for entry in self._running.values() if entry.finish]

        def take(reports: list[np.ndarray]) -> None:
            for rows in reports:
                spoken = rows[:, None, 2:]
                for index, (ticket, frame) in enumerate(rows[:, :2].tolist()):
                    entry = self._by_ticket.get(ticket)
                    if entry is None:
                        continue
                    new = codes.setdefault(ticket, [])
                    if frame == entry.frames + len(new):  # a repeated step reports a frame again
                        new.append(spoken[index])

        def missing() -> bool:
            """Whether a request that has ended lacks frames: then they are waited for, else never."""
            return any(e.frames + len(codes.get(e.ticket, ())) < e.told for e in ended)

        take(self.model.reports.collect())
        while missing() and (waited := self.model.reports.wait()):
            take(waited)
        frames = []
        for ticket in sorted({*codes, *(entry.ticket for entry in ended)}):
            entry, new = self._by_ticket[ticket], codes.get(ticket, [])
            if not new and entry.finish is None:
                continue
            joined = new[0] if len(new) == 1 else np.concatenate([self._no_frames, *new])
            frames.append(TalkerFrames(entry.id, entry.frames, joined, entry.finish))
            entry.frames += len(new)
            if entry.finish is not None:
                if entry.frames != entry.told:
                    raise EngineFailed(f"request {entry.id}: {entry.frames} frames read, {entry.told} made")
                self._release(entry)
        return frames

    def close(self) -> None:
        """Shut vLLM down. Safe to call twice."""
        client, self._client = self._client, None
        if client is not None:
            compat.stop(client)
            if hasattr(self, "model"):  # else the start failed
                self.model.step.close()

    def __enter__(self) -> Talker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
