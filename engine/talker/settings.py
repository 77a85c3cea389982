"""How a talker is run. Built from engine/config.py; checked here, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError

CHOICES = {
    "scheduler_mode": ("sync", "async"),
    "dtype": ("float32", "bfloat16"),
    "device": ("cpu", "cuda"),
    "load_format": ("auto", "dummy"),
    "cudagraph": ("full", "decode", "none"),
    "predictor": ("auto", "fused", "skinny", "persistent", "plain"),
    "predictor_weights": ("auto", "fp8"),
    "predictor_placement": ("auto", "graph", "own_graph", "eager"),
    "layers": ("auto", "separate", "skinny", "paged"),
    "stream_priority": ("auto", "high", "normal"),
}

# What "auto" means where any load may give other roundings.
AUTO_PREDICTOR = "persistent"
AUTO_LAYERS = "paged"
AUTO_PRIORITY = "high"
PREDICTOR_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows of graphs of its own


@dataclass(frozen=True)
class TalkerSettings:
    """Start-up settings of the talker.

    Attributes:
        max_num_seqs: requests in one step.
        slots: requests known to the talker, waiting ones included; None for twice max_num_seqs.
        max_model_len: prefill rows plus frames of one request.
        max_prompt: prefill plus trailing text rows of one request.
        max_frames: frames of one request at most.
        max_num_batched_tokens: rows of one step; bounds how long an arrival holds up the running streams.
        scheduler_mode: "sync" or "async" (vLLM launches a step before the last one's tokens are read).
        dtype: "float32" (the CPU's default, and for parity) or "bfloat16".
        load_format: "auto" does as the checkpoint says, "dummy" makes random weights of its geometry.
        kv_cache_memory_bytes: memory of the paged KV cache; None or 0 holds max_num_seqs requests of full length.
        cudagraph: "full" captures decode steps and steps with a prefill, "decode" only the former. CUDA only.
        capture_sizes: token counts to capture; those above max_num_batched_tokens are left out.
        predictor: "fused" (kernels of our own), "skinny" (for one or two streams on CUDA in bfloat16 fewer ones, that
            read the matrices themselves; otherwise as fused), "persistent" (for one stream a single kernel, on a Hopper
            GPU and where the model's sizes suit it; otherwise, and in the step beside a first chunk of the codec, as
            skinny) or "plain" (torch operations, for comparison); "auto" is persistent, with `deterministic` fused.
        predictor_weights: "auto" is `dtype`; "fp8" rounds the predictor's matrices to eight bits (fp8.py), which shifts
            the sampled distribution slightly. The same weights on every path; skinny's kernels read half the bytes,
            persistent has none for them (and is skinny then).
        predictor_placement: where code 0 and the predictor run: "graph" inside the talker's step and its graph;
            "own_graph" after it in graphs of their own, of as many rows as there are frames to make (the talker's graph
            of a step with a prompt always holds max_num_seqs); "eager" after it without any, to be measured against.
            "auto" is own_graph where prompts run in graphs, unless `deterministic`; else inside the step.
        layers: the talker's own layers: "separate" (one kernel for each product and norm), "skinny" (in a step of one
            row on CUDA in bfloat16 the predictor's kernels of that name; otherwise as separate) or "paged" (as skinny,
            with norms, rotary embedding, cache and attention in one kernel, too, in place of vLLM's); "auto" is paged
            unless `deterministic`, or with a plain predictor, which has no such kernels.
        stream_priority: CUDA only: with "high" ("auto"), where both wait for room, the device starts the talker's
            kernels before the codec's; with "normal" in the order in which they came.
        deterministic: CUDA only: the same seed gives the same codes at any load. vLLM's batch-invariant kernels (about
            10 ms a step instead of 6), and each prompt in a step of its own (an arrival costs the others a step).
        self_check: CUDA graphs: compare hidden states of graph and eager steps at start, refuse to run if they differ.
        threads: CPU threads of torch, 0 leaves them alone.
    """

    max_num_seqs: int = 16
    slots: int | None = None
    max_model_len: int = 2048
    max_prompt: int = 1024
    max_frames: int = 1024
    max_num_batched_tokens: int = 1280
    scheduler_mode: str = "sync"
    dtype: str = "float32"
    device: str = "cpu"
    load_format: str = "auto"
    kv_cache_memory_bytes: int | None = None
    cudagraph: str = "full"
    capture_sizes: tuple[int, ...] = (1, 4, 8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 480, 640, 960, 1280)
    predictor: str = "auto"
    predictor_weights: str = "auto"
    predictor_placement: str = "auto"
    layers: str = "auto"
    stream_priority: str = "auto"
    deterministic: bool = False
    self_check: bool = True
    threads: int = 0

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"talker.{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}",
                    field=f"talker.{name}",
                )
        for name in (
            "max_num_seqs",
            "slot_count",
            "max_model_len",
            "max_prompt",
            "max_frames",
            "max_num_batched_tokens",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"talker.{name} must be a positive integer, not {value!r}", field=f"talker.{name}")
        if self.slot_count < self.max_num_seqs:
            raise ConfigError(
                f"talker.slots ({self.slots}) must be at least talker.max_num_seqs ({self.max_num_seqs}): "
                "every request in a step needs a slot",
                field="talker.slots",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"talker.max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least talker.max_num_seqs "
                f"({self.max_num_seqs}): a decode step has one row per request",
                field="talker.max_num_batched_tokens",
            )
        if self.max_model_len < 3:
            raise ConfigError("talker.max_model_len must be at least 3", field="talker.max_model_len")
        if self.device == "cpu" and self.deterministic:
            raise ConfigError(
                "talker.deterministic switches CUDA kernels of vLLM; on the CPU leave it off (float32 there repeats)",
                field="talker.deterministic",
            )
        self._check_skinny()
        self._check_placement()
        if self.device == "cuda" and self.cudagraph != "none":
            if not self.capture_sizes:
                raise ConfigError(
                    "talker.capture_sizes is empty; name sizes or set talker.cudagraph to none",
                    field="talker.capture_sizes",
                )
            if any(not isinstance(n, int) or n < 1 for n in self.capture_sizes):
                raise ConfigError("talker.capture_sizes must hold positive integers", field="talker.capture_sizes")

    def _check_skinny(self) -> None:
        for name, other in (("predictor", "fused"), ("layers", "separate")):
            if self.deterministic and getattr(self, name) in ("skinny", "persistent", "paged"):
                raise ConfigError(
                    f"talker.{name} is {getattr(self, name)}, which sums in another order for another number of "
                    f"streams; talker.deterministic asks for the same codes at any load: set talker.{name} to auto or "
                    f"{other}",
                    field=f"talker.{name}",
                )
        if self.predictor == "plain" and self.layers in ("skinny", "paged"):
            raise ConfigError(
                f"talker.layers is {self.layers}, but talker.predictor is plain, which has the layers in torch "
                "operations; set talker.layers to auto or talker.predictor to fused",
                field="talker.layers",
            )

    def _check_placement(self) -> None:
        placement, why = self.predictor_placement, None
        if placement in ("graph", "own_graph") and self.device == "cpu":
            why = "the CPU has no CUDA graphs; set it to auto or eager"
        elif placement == "graph" and self.cudagraph == "none":
            why = "talker.cudagraph is none, so there is no graph to be inside of; set one of the two otherwise"
        if why:
            raise ConfigError(
                f"talker.predictor_placement is {placement}, but {why}", field="talker.predictor_placement"
            )

    @property
    def slot_count(self) -> int:
        return 2 * self.max_num_seqs if self.slots is None else self.slots

    @property
    def placement(self) -> str:
        """`predictor_placement` without "auto"; there "graph" also stands for inside a step that is no graph."""
        if self.predictor_placement != "auto":
            return self.predictor_placement
        graphs = self.device == "cuda" and self.cudagraph == "full"
        return "own_graph" if graphs and not self.deterministic else "graph"

    @property
    def predictor_sizes(self) -> list[int]:
        """Rows of the predictor's own graphs."""
        return sorted({n for n in PREDICTOR_SIZES if n < self.max_num_seqs} | {self.max_num_seqs})

    @property
    def predictor_path(self) -> str:
        """`predictor` without "auto"."""
        if self.predictor != "auto":
            return self.predictor
        return "fused" if self.deterministic else AUTO_PREDICTOR

    @property
    def layers_path(self) -> str:
        """`layers` without "auto"."""
        if self.layers != "auto":
            return self.layers
        return "separate" if self.deterministic or self.predictor == "plain" else AUTO_LAYERS

    @property
    def goes_first(self) -> bool:
        """Whether the talker's kernels go before the codec's."""
        wanted = AUTO_PRIORITY if self.stream_priority == "auto" else self.stream_priority
        return self.device == "cuda" and wanted == "high"

    @property
    def one_prompt_a_step(self) -> bool:
        """See one_prompt.py."""
        return self.deterministic

    @property
    def graph_sizes(self) -> list[int]:
        """Token counts to capture. Always holds max_num_seqs (a full decode batch), never 2 in full mode.

        A graph of two tokens is captured for two requests of one token each, and a chunk of two rows of one prompt
        would replay it with a query length it was not captured for.
        """
        limit = self.max_num_seqs if self.cudagraph == "decode" else self.max_num_batched_tokens
        sizes = {n for n in self.capture_sizes if n <= limit} | {self.max_num_seqs}
        return sorted(sizes - {2} if self.cudagraph == "full" else sizes)
