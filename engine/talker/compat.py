"""Everything that depends on vLLM's version or platform: 0.26 on CUDA (runner V2), 0.30 on the CPU (runner V1).

vLLM is driven in this process at the level of its engine core: no tokenizer, no detokenizer, no output processor.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from engine.errors import ConfigError
from engine.talker.geometry import StackGeometry, TalkerGeometry
from engine.talker.one_prompt import scheduler_class
from engine.talker.settings import TalkerSettings

LOAD_FORMAT = "chorus"
CPU_BLOCK = 32  # vLLM 0.30's CPU attention takes KV blocks of multiples of 32 tokens
CUDA_BLOCK = 16


def prepare_environment(settings: TalkerSettings) -> None:
    """Variables that vLLM reads when it is imported or configured. A value set by the user is kept where it may be."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core in this process
    # V2 is the default on CUDA; on the CPU it needs a Triton that few machines have, and V1 is what is tested there
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if settings.device == "cuda" else "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout belongs to the program's answers
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if settings.deterministic:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
        os.environ["CUBLASLT_WORKSPACE_SIZE"] = "1"


def attention_layer(geometry: StackGeometry, vllm_config: Any, name: str) -> Any:
    """vLLM's paged attention for one layer: q [N, heads * d], k and v [N, kv_heads * d] to [N, heads * d]."""
    try:
        from vllm.attention.layer import Attention
    except ImportError:  # moved
        from vllm.model_executor.layers.attention import Attention
    return Attention(
        geometry.heads,
        geometry.head_dim,
        geometry.head_dim**-0.5,
        num_kv_heads=geometry.kv_heads,
        cache_config=vllm_config.cache_config,
        prefix=name,
    )


def register(name: str, model_class: type, fill: Callable[[Any], None]) -> None:
    """Make the model class known, and the loader that fills it.

    The class itself is registered: of a class given as a string, vLLM learns by running a process of many seconds.
    """
    from vllm import ModelRegistry
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class Loader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            return None

        def load_weights(self, model: Any, model_config: Any) -> None:
            fill(model)

    ModelRegistry.register_model(name, model_class)
    # the public decorator warns on every registration after the first
    model_loader._LOAD_FORMAT_TO_MODEL_LOADER[LOAD_FORMAT] = Loader


def kv_cache_bytes(geometry: TalkerGeometry, settings: TalkerSettings) -> int:
    """The setting, or room for max_num_seqs requests of full length (and one block more each)."""
    g, block = geometry.talker, CPU_BLOCK if settings.device == "cpu" else CUDA_BLOCK
    width = 4 if settings.dtype == "float32" else 2
    token = 2 * g.layers * g.kv_heads * g.head_dim * width
    if settings.kv_cache_memory_bytes:
        needed = (settings.max_model_len // block + 2) * block * token
        if settings.kv_cache_memory_bytes < needed:
            raise ConfigError(
                f"talker.kv_cache_memory_bytes is {settings.kv_cache_memory_bytes}; one request of "
                f"talker.max_model_len = {settings.max_model_len} needs {needed}",
                field="talker.kv_cache_memory_bytes",
            )
        return settings.kv_cache_memory_bytes
    return (settings.max_model_len // block + 2) * block * token * settings.max_num_seqs


def engine_config(folder: Path, geometry: TalkerGeometry, settings: TalkerSettings) -> Any:
    """vLLM's configuration."""
    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, Any] = {
        "model": str(folder),
        "load_format": LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # no sampling defaults of the checkpoint
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        # Equal slot numbers hash alike: with prefix caching a reused slot would read another request's keys.
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "kv_cache_memory_bytes": kv_cache_bytes(geometry, settings),
        "gpu_memory_utilization": 0.05,  # vLLM asks for this much free memory at start; the line above decides
        "disable_log_stats": True,
        "seed": 0,
        "async_scheduling": settings.scheduler_mode == "async",
    }
    if settings.one_prompt_a_step:
        arguments["scheduler_cls"] = scheduler_class(settings.scheduler_mode == "async")
    if settings.device == "cpu":
        arguments |= {"enforce_eager": True, "block_size": CPU_BLOCK}
    elif settings.cudagraph == "none":
        arguments |= {"enforce_eager": True}
    else:
        mode = "FULL" if settings.cudagraph == "full" else "FULL_DECODE_ONLY"
        arguments["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": mode,
            "cudagraph_capture_sizes": settings.graph_sizes,
        }
    with _keep_thread_setting():
        config = EngineArgs(**arguments).create_engine_config()
    if settings.device == "cpu" and settings.scheduler_mode == "async":
        # The platform turned it off ("not required on CPU"). Scheduler and queue are chosen from this field later.
        config.scheduler_config.async_scheduling = True
    return config


def start(config: Any, settings: TalkerSettings) -> Any:
    """vLLM's in-process engine core client, model loaded and graphs captured."""
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor import Executor

    with contextlib.ExitStack() as stack:
        stack.enter_context(_keep_thread_setting())
        if settings.device == "cpu" and settings.scheduler_mode == "async":
            stack.enter_context(_async_start_on_cpu())
        client = InprocClient(config, Executor.get_class(config), False)
        _live.append(client)
    if settings.device == "cpu" and settings.scheduler_mode == "async":
        runner(client).prepare_inputs_event = None  # guards buffers that a device copies from; nothing copies here
    return client


_live: list[Any] = []  # clients started in this process and not stopped


def _forget_graph_pool() -> None:
    """vLLM keeps one CUDA graph pool a process. Once its last graph is gone PyTorch frees the pool, and capturing into
    the dead handle fails (seen on CUDA: "use_count > 0" when a second engine started): the next one makes its own."""
    from vllm.platforms import current_platform

    type(current_platform)._global_graph_pool = None


def stop(client: Any) -> None:
    """Shut a client down. vLLM's process groups are one per process: 0.30 destroys them in every shutdown, which breaks
    any other engine that still runs here, so only the last one may."""
    from vllm.v1.engine import core

    if client in _live:
        _live.remove(client)
    destroy = getattr(core, "cleanup_dist_env_and_memory", None)
    try:
        if _live and destroy is not None:
            core.cleanup_dist_env_and_memory = lambda *_, **__: None
        client.shutdown()
        if not _live:
            _forget_graph_pool()
    finally:
        if destroy is not None:
            core.cleanup_dist_env_and_memory = destroy


@contextlib.contextmanager
def _keep_thread_setting() -> Iterator[None]:
    """vLLM's CPU worker replaces torch.set_num_threads by a function that does nothing, for the whole process."""
    original = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = original


class _Completed:
    """Stands for a CUDA stream or event on a machine where every operation has ended when it returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def record(self, *_: Any) -> None:
        """Nothing to wait for."""

    wait_stream = wait_event = synchronize = wait = record


@contextlib.contextmanager
def _async_start_on_cpu() -> Iterator[None]:
    """Async scheduling on the CPU: order and hand-over as on CUDA, no overlap.

    Runner V1 makes a copy stream and events; the CPU build of torch has neither. During start they are stood in for,
    and the class that carries a step's tokens to the host is replaced for good by one that has them already.
    """
    from vllm.v1.worker import gpu_model_runner

    class HostOutput(gpu_model_runner.AsyncModelRunnerOutput):
        def __init__(
            self, *, model_runner_output: Any, sampled_token_ids: torch.Tensor, invalid_req_indices: list[int], **_: Any
        ) -> None:
            self.output, self.invalid = model_runner_output, invalid_req_indices
            # the runner hands these two on to the next step's input batch
            self.sampled_token_ids_cpu, self.async_copy_ready_event = sampled_token_ids.clone(), _Completed()

        def get_output(self) -> Any:
            tokens = self.sampled_token_ids_cpu.tolist()
            for index in self.invalid:
                tokens[index].clear()
            self.output.sampled_token_ids = tokens
            return self.output

    saved = torch.cuda.Stream, torch.cuda.Event
    torch.cuda.Stream = torch.cuda.Event = _Completed  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.cuda.Stream, torch.cuda.Event = saved  # type: ignore[misc]
    gpu_model_runner.AsyncGPUModelRunnerOutput = HostOutput  # type: ignore[misc, assignment]


def runner(client: Any) -> Any:
    """The model runner inside the client."""
    return client.engine_core.model_executor.driver_worker.worker.model_runner


def model(client: Any) -> Any:
    found = runner(client)
    return found.get_model() if hasattr(found, "get_model") else found.model


def free_blocks(client: Any) -> int:
    """KV blocks that belong to no request."""
    return client.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def in_flight(client: Any) -> bool:
    """Whether vLLM has work of its own left: running requests, ended ones to forget, or a step launched ahead."""
    core = client.engine_core
    return core.scheduler.has_requests() or bool(core.batch_queue)


@functools.lru_cache(maxsize=1024)
def _parameters(max_frames: int, end_token: int) -> Any:
    """Shared by requests of one length, as nobody changes them: checking them takes a quarter of adding a request."""
    from vllm.sampling_params import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=max_frames,
        stop_token_ids=[end_token],
        ignore_eos=True,
        detokenize=False,
    )


def request(identity: str, slot: int, length: int, max_frames: int, end_token: int) -> Any:
    """A request to vLLM: the slot number as every prompt token; greedy, as sampling happens in the model."""
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=identity,
        prompt_token_ids=[slot] * length,
        mm_features=None,
        sampling_params=_parameters(max_frames, end_token),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
