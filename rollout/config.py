"""Configuration of rollouts: engines, sampling, collection. No torch, no Ray, no SGLang.

Each kind of engine has a subclass of `EngineConfig` in its own room, of which the rest of the project asks all that
depends on the engine.
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from algorithms.config import Checked, Custom, Problem
from algorithms.config.rules import Rule, above, at_least, ruled, within

if TYPE_CHECKING:
    from rollout.engine import Engine, EngineSetup
    from rollout.processes.gpu_host import Lack
    from rollout.types import SampleGroup


class DType(Enum):
    """Floating-point type of weights and activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Routing(Enum):
    """Choice of the experts that the trainer uses for a token of a mixture. Engines return what it needs."""

    replay = "replay"
    """Those that the engine chose when it read the token; the factors of their outputs are the trainer's."""
    weights = "weights"
    """The same with the engine's factors; their gradient is that of the trainer's own."""
    live = "live"
    """Those that the trainer chooses itself: engines return nothing."""


class Quantization(Enum):
    """Format of the weights of an engine's attention and MLP projections."""

    none = "none"
    fp8 = "fp8"
    """8-bit floating point (e4m3), one scale per block of 128 x 128."""
    int8 = "int8"
    """8-bit integers, one scale per output channel."""
    int4 = "int4"
    """4-bit integers, one scale per 128 inputs of an output channel: a stress test of the correction."""


class PauseMode(Enum):
    """Treatment of unfinished responses while an engine loads new weights."""

    retract = "retract"
    """Responses continue with the new weights after a new prefill of prompt and tokens so far: exact, at the cost of
    the prefill."""
    in_place = "in_place"
    """Responses continue with the new weights and the KV cache of the old weights: no prefill, but later tokens are
    sampled from a mix of old KV cache and new weights, which is the policy of no version."""
    abort = "abort"
    """Responses end at the tokens so far; the collector may resume them."""


LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of hosts that only this machine can reach."""


@dataclass(kw_only=True, slots=True)
class EngineConfig(Checked):
    """Keys of every rollout engine. `rollout=sglang`, `rollout=torch` and `rollout=vllm` choose their kind."""

    kind: ClassVar[str] = ""
    package: ClassVar[str] = ""
    """Import name of what the engine needs beside Parity's own dependencies; "" for nothing."""
    package_remedy: ClassVar[str] = ""
    """How it is installed, or what to use instead; without a full stop."""
    graph_bytes: ClassVar[int] = 0
    """Memory of the host that an engine takes for each of its GPUs if it sleeps, in addition to that of a process."""
    work_bytes: ClassVar[int] = 0
    """Memory of each of its GPUs that an engine takes besides weights and cache, if nothing else says how much."""
    route_number_bytes: ClassVar[int] = 0
    """Bytes of the host's memory in which each process of an engine keeps a number of a route, for every token that its
    cache has room for."""
    num_engines: int = ruled(1, at_least(1))
    """Number of rollout workers, each with one engine and a full copy of the weights."""
    dtype: DType = DType.bfloat16
    """Floating-point type of the engine's weights and activations. Vetted: bfloat16."""
    quantization: Quantization = Quantization.none
    """Format to which the weights of all engines are quantised at every sync (none, fp8, int8, int4). Combine
    quantisation with correction=tis or correction=mis."""
    exact: bool = False
    """Compute every token in the same arithmetic in the engine and in the trainer: their log-probs are equal in every
    bit, and K3 is 0. On GPUs not yet run."""
    gpus_per_engine: float = ruled(0.0, at_least(0))
    """Ray GPUs reserved per rollout worker, in sum; 0 on a CPU-only machine. An engine that shares its GPUs with ranks
    takes the same part of each: with rollout.engine_args.tp_size=4, 2 means half of each of 4 GPUs."""
    start_timeout_s: float = ruled(1200.0, above(0, "seconds"))
    """Deadline in seconds for an engine to become ready after its start. On a GPU the first start of SGLang compiles
    kernels for minutes."""
    generate_timeout_s: float = ruled(600.0, above(0, "seconds"))
    """Deadline in seconds of one request, counted from the moment the engine begins to process the request; SGLang does
    not tell it, so there the time starts again with each of its answers. An engine that misses the deadline counts as
    dead."""
    answer_timeout_s: float = ruled(60.0, above(0, "seconds"))
    """Deadline in seconds for an engine with requests to answer a poll. An engine that misses the deadline counts as
    dead."""
    sync_timeout_s: float = ruled(120.0, above(0, "seconds"))
    """Deadline in seconds of one weight sync."""
    probe_tolerance: float | None = ruled(None, above(0, "nats"))
    """Largest mean |log-prob of the engine - log-prob of the trainer|, in nats, that the probe before training accepts;
    null allows the difference that rounding explains (0.001 in float32, 0.125 in bfloat16 at temperature 1)."""
    max_restarts: int = ruled(3, at_least(0))
    """Number of times per run that a dead or silent engine is restarted; 0 never restarts an engine."""

    @property
    def max_running(self) -> int | None:
        """Largest number of sequences that an engine decodes together; None if the engine decides."""
        return None

    @property
    def held_tokens(self) -> int | None:
        """Tokens for whose keys and values an engine takes memory at its start, whatever it samples; None if that grows
        with what it samples, or is a share of its GPUs."""
        return None

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks of an engine; on GPUs each has a GPU of its own."""
        return 1

    @property
    def gpu_share(self) -> float:
        """Part that an engine takes of each of its GPUs; 0 on a CPU."""
        return self.gpus_per_engine / self.tp_size

    @property
    def returns_routes(self) -> bool:
        """True if the engines can return the experts that they chose for each token of a mixture."""
        return False

    @property
    def takes_quantized(self) -> bool:
        """True if the engines load 8-bit values and scales; other engines load dequantised weights in `dtype`."""
        return False

    def use_problems(self, use: EngineUse) -> Iterator[Problem]:
        """Yield the broken rules about what a run asks of its engines, with whole keys: "sampling.top_k"."""
        yield from ()

    @classmethod
    def missing_package(cls) -> Problem | None:
        """The Problem of an engine whose package is not installed."""
        if not cls.package or importlib.util.find_spec(cls.package) is not None:
            return None
        rule = "must be an engine that is installed"
        return Problem(key="rollout", rule=rule, value=cls.kind, remedy=f"{cls.package_remedy}.")

    def gpu_lacks(self, *, sleeps: bool) -> list[Lack]:
        """What an engine on a GPU of this host lacks beside torch with CUDA; `sleeps`: it has to free its memory."""
        return []

    def context_length(self, model: Mapping[str, Any]) -> int | None:
        """Tokens of the longest prompt with its response, for a model with this config.json; None: it is not known."""
        length = model.get("max_position_embeddings")
        return length if isinstance(length, int) else None

    def model_rule(self, model: Mapping[str, Any]) -> str:
        """The rule that a model with this config.json breaks, after "must"; "" if the engine can serve it."""
        return ""

    def adapter_rule(self, chosen: Iterable[str], *, among: Iterable[str]) -> str:
        """The rule that an adapter of the layers `chosen` breaks if it is sent by itself; "" if it breaks none."""
        return ""

    def taken_bytes(self, gpu_bytes: int) -> int | None:
        """Bytes that an engine takes of each of its GPUs, of `gpu_bytes` each; None: what weights and cache need."""
        return None

    def static_bytes(self, gpu_bytes: int, *, held: int, sleeps: bool) -> int:
        """Bytes of each of its GPUs in which an engine can have weights and cache; `sleeps`: it is there alone. `held`:
        what a rank has there when the engine starts."""
        return int((1 if sleeps else self.gpu_share) * gpu_bytes)

    @abstractmethod
    def build(self, setup: EngineSetup) -> Engine:
        """Make the engine of one worker, not yet started. What is slow to import is imported here."""
        raise NotImplementedError(f"{type(self).__name__}.build")


@dataclass(kw_only=True, slots=True)
class CustomEngine(EngineConfig, Custom):
    """An engine of a user: `build` makes it. tests/rollout/toy_engine.py is one, docs/extend.md has the contract."""

    kind: ClassVar[str] = "custom"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineUse:
    """What a run asks of its engines, in other sections of the config."""

    sampling: SamplingConfig
    lora_rank: int
    """Rank of the policy's adapter; 0 without one."""
    sends_adapter: bool
    """True if the engines get the adapter by itself."""
    schedule: str
    """Name of the schedule."""
    updates_in_flight: bool
    """True if weights change while responses are unfinished."""
    eval_temperature: float | None = None
    """Temperature of an evaluation, if it has one of its own."""
    trains: bool = True
    """False in an evaluation, which has no ranks."""


def pause_problems(mode: PauseMode, use: EngineUse) -> Iterator[Problem]:
    """Yield the broken rule of a `rollout.pause_mode` that loses what the schedule needs."""
    if mode is PauseMode.abort and use.updates_in_flight:
        rule = f"must be retract or in_place with schedule={use.schedule}: weights change while responses are "
        rule += "unfinished, which must go on"
        yield Problem(key="rollout.pause_mode", rule=rule, value=mode, remedy="Vetted: retract.")


TOP_P = within(0, 1, "(]")
TOP_K = Rule("must be >= 2, or -1 for all tokens", lambda count: count == -1 or count >= 2)
MIN_P = within(0, 1, "[)")
"""Rules of truncation, for training and for evaluation."""


@dataclass(kw_only=True, slots=True)
class SamplingConfig(Checked):
    """Parameters for sampling responses in training.

    With top_p, top_k or min_p the engine returns the tokens that it kept, and the trainer scores every token among
    these (`algorithms/truncation.py`).
    """

    temperature: float = ruled(
        1.0,
        Rule("must be > 0 (training needs sampling)", lambda temperature: temperature > 0),
        remedy="Vetted: 1.0. Greedy decoding is used by the evaluation on its own.",
    )
    """Divisor of the logits, in the engine and in the trainer. Vetted: 1.0."""
    max_new_tokens: int = ruled(1024, at_least(1))
    """Upper bound on the tokens of a response."""
    top_p: float = ruled(1.0, TOP_P)
    """Tokens are drawn from the most probable ones, up to this mass; 1 draws from all. Vetted: 1.0."""
    top_k: int = ruled(-1, TOP_K)
    """Tokens are drawn from so many of the most probable ones; -1 draws from all. Vetted: -1."""
    min_p: float = ruled(0.0, MIN_P)
    """Smallest probability of a token that is drawn, as a share of the largest one; 0 draws from all. Vetted: 0.0."""
    stop: list[Any] = field(default_factory=list)
    """Tokens that end a response, in training and in evaluation, beside those that the model's files name: texts of one
    token, or ids, for example ["<|im_end|>"]."""

    def conflicts(self) -> Iterator[Problem]:
        if not all(isinstance(each, str | int) and not isinstance(each, bool) and each != "" for each in self.stop):
            yield self.broken("stop", "must list texts of one token, or token ids")

    @property
    def truncation(self) -> list[float]:
        """top_p, top_k and min_p."""
        return [self.top_p, self.top_k, self.min_p]

    @property
    def is_truncated(self) -> bool:
        """True if tokens are drawn from a part of the vocabulary."""
        return self.truncation != [1.0, -1, 0.0]


class CollectOrder(Enum):
    """Order in which a step takes finished groups."""

    submission = "submission"
    """Groups in the order in which their prompts were submitted: no preference for short answers."""
    completion = "completion"
    """Groups in the order in which they finish: less waiting for the longest responses, and a bias towards short
    answers (rollout/length_bias)."""


@dataclass(kw_only=True, slots=True)
class CollectConfig(Checked):
    """Collection of the groups of a step. Choose with `collect=fixed` or `collect=dynamic`."""

    kind: ClassVar[str] = ""
    max_invalid_fraction: float = ruled(0.05, within(0, 1))
    """Share of a step's samples that may be dropped (no log-prob, wrong version, abort) before the run stops. In an
    evaluation so many responses may fail, and count as incorrect."""
    min_failed: int = ruled(8, at_least(0, "samples"))
    """Number of responses of a step, or of an evaluation, that a rollout function or an engine may fail to finish
    without that share counting, unless all fail."""
    over_sampling: float = ruled(1.0, at_least(1))
    """Number of prompts being sampled at the beginning of a step, as a multiple of batch.prompts_per_step."""
    order: CollectOrder = CollectOrder.submission
    """Order in which a step takes finished groups. Vetted: submission."""
    partial: bool = False
    """Partial rollout: when a step has its groups, abort and keep the unfinished responses, and resume them at the
    start of the next step."""
    max_partial_age: int = ruled(1, at_least(1, "rollout step"))
    """Largest age of a token of a resumed group, in rollout steps before the step that trains on the token."""

    def conflicts(self) -> Iterator[Problem]:
        if self.partial and self.over_sampling == 1:
            yield self.broken(
                "partial",
                "has no effect with collect.over_sampling=1: a step then waits for every response",
                "Set collect.over_sampling=1.5, or collect.partial=false.",
            )
        elif self.partial and self.order is CollectOrder.submission and self.over_sampling > 1 + self.max_partial_age:
            yield self.broken(
                "max_partial_age",
                f"must be >= collect.over_sampling - 1 ({self.over_sampling - 1:g}): groups wait so many steps "
                "for their turn, and those that are too old are thrown away",
            )


@dataclass(kw_only=True, slots=True)
class FixedCollectConfig(CollectConfig):
    """Fixed collection: a step trains on every sampled group (GRPO)."""

    kind: ClassVar[str] = "fixed"

    def conflicts(self) -> Iterator[Problem]:
        yield from CollectConfig.conflicts(self)
        if self.over_sampling > 1 and not self.partial and self.order is CollectOrder.submission:
            yield self.broken(
                "over_sampling",
                "must be 1: collect=fixed takes the groups that were submitted first, others would be thrown away",
                "Set collect.partial=true, which keeps them for the next step, or use collect=dynamic.",
            )


@dataclass(kw_only=True, slots=True)
class CustomFilter(Custom):
    """A user's decision which groups a step trains on."""

    @abstractmethod
    def __call__(self, group: SampleGroup) -> bool:
        """True if the group is kept; its samples have rewards. Runs in the driver, while engines sample."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class DynamicCollectConfig(CollectConfig):
    """DAPO dynamic sampling: groups whose samples all agree are dropped, and new prompts replace them."""

    kind: ClassVar[str] = "dynamic"
    over_sampling: float = ruled(1.5, at_least(1))
    """Number of prompts per round, as a multiple of the number of missing groups. Vetted: 3.0 at scale."""
    max_rounds: int = ruled(10, at_least(1))
    """Largest number of rounds of generation per step; if groups are still missing, the run stops with an error that
    gives the counts. Vetted: 10."""
    filter: CustomFilter | None = None
    """Your own decision which groups are kept, path/to/file.py:Name; null drops the groups whose samples are all
    correct, or all wrong."""
    min_prompts: int | None = ruled(None, at_least(1))
    """Number of kept groups that suffices for a step after max_rounds; null means batch.prompts_per_step."""
