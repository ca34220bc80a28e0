"""Configuration of rollouts: engines, sampling, collection. No torch, no Ray, no SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from urllib.parse import urlsplit

from algorithms.config import Checked, Custom, Problem
from algorithms.config.home import MAY_NAME_PATHS
from algorithms.config.rules import Rule, above, at_least, ruled, within

if TYPE_CHECKING:
    from rollout.types import SampleGroup


class DType(Enum):
    """Floating-point type of weights and activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Quantization(Enum):
    """Format of the weights of an engine's attention and MLP projections."""

    none = "none"
    fp8 = "fp8"
    """8-bit floating point (e4m3), one scale per block of 128 x 128."""
    int8 = "int8"
    """8-bit integers, one scale per output channel."""
    int4 = "int4"
    """4-bit integers, one scale per 128 inputs of an output channel: a stress test of the correction."""


@dataclass(kw_only=True, slots=True)
class EngineConfig(Checked):
    """Keys of every rollout engine. Choose the kind of engine with `rollout=sglang` or `rollout=torch`."""

    kind: ClassVar[str] = ""
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
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks of an engine; on GPUs each has a GPU of its own."""
        return 1

    @property
    def gpu_share(self) -> float:
        """Part that an engine takes of each of its GPUs; 0 on a CPU."""
        return self.gpus_per_engine / self.tp_size

    @property
    def takes_quantized(self) -> bool:
        """True if the engines load 8-bit values and scales; other engines load dequantised weights in `dtype`."""
        return False


OWNED_SGLANG_ARGS = frozenset({
    "model_path", "tokenizer_path", "host", "port", "api_key", "admin_api_key", "dtype", "device",
    "skip_tokenizer_init", "random_seed", "trust_remote_code", "sleep_on_idle", "log_level", "custom_weight_loader",
    "weight_version",
})  # fmt: skip
"""SGLang options that Parity sets itself; a value in engine_args would contradict a key of Parity."""

REFUSED_SGLANG_ARGS = {
    "enable_custom_logit_processor": "it executes code sent with a request (CVE-2026-7304)",
    **dict.fromkeys(("enable_metrics", "enable_metrics_for_all_schedulers"), "/metrics would answer without a key"),
    **dict.fromkeys(
        (
            "decoupled_spec_bind_endpoint", "decoupled_spec_connect_endpoints", "disaggregation_bootstrap_port",
            "disaggregation_mode", "dist_init_addr", "enable_trace", "encoder_bootstrap_port", "encoder_register_urls",
            "encoder_urls", "engine_info_bootstrap_port", "gated_launch_port", "grpc_mode", "grpc_port",
            "kv_events_config", "load_publish_endpoint", "otlp_traces_endpoint",
            "remote_instance_weight_loader_seed_instance_ip",
            "remote_instance_weight_loader_seed_instance_service_port",
            "remote_instance_weight_loader_send_weights_group_ports", "smg_grpc_mode", "smg_http_sidecar_port",
        ),
        "the server would listen at another port, or connect to another address, without a key",
    ),
}  # fmt: skip
"""SGLang options that are refused -> the reason."""

QUANTIZED_SGLANG_ARGS = ("json_model_override_args", "load_format")
"""SGLang options that Parity sets for engines that load quantised weights."""

UNSUPPORTED_SGLANG_ARGS = frozenset(
    {"dp_size", "enable_lora", "ep_size", "lora_paths", "pp_size", "quantization", "speculative_algorithm"}
)
"""SGLang options under which the weights of an engine cannot be verified tensor by tensor yet."""


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


SGLANG_REMEDY = 'make setup in the checkout, or pip install -e ".[sglang]" there, or use rollout=torch'
"""Remedy if SGLang is not installed."""
MAX_REPLY_BYTES = 64 << 20
"""Size at which a reply of a server is given up. A token takes about 60 bytes, and 7 per kept token of its support."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of hosts that only this machine can reach."""


@dataclass(kw_only=True, slots=True)
class SGLangConfig(EngineConfig):
    """A real SGLang server per rollout worker, over loopback HTTP."""

    kind: ClassVar[str] = "sglang"
    pause_mode: PauseMode = PauseMode.retract
    """Treatment of unfinished responses while weights are replaced. Vetted: retract."""
    servers: list[str] = field(default_factory=list)
    """URLs of running servers, one per engine, for example ["http://127.0.0.1:30000"]; Parity then starts no server.
    The API keys come from the environment: PARITY_SGLANG_API_KEY and PARITY_SGLANG_ADMIN_API_KEY."""
    allow_remote: bool = False
    """Allow servers on other machines. Prompts, responses and keys then cross the network."""
    engine_args: Annotated[dict[str, Any], MAY_NAME_PATHS] = field(default_factory=dict)
    """SGLang server options in snake_case, passed through; ~ or ~user at the start of a text becomes that home
    directory where there is such a user. Add one with +rollout.engine_args.NAME=value. tp_size is the number of GPUs of
    one engine (tensor parallelism), which are on one machine."""

    @property
    def max_running(self) -> int | None:
        limit = self.engine_args.get("max_running_requests")
        return limit if isinstance(limit, int) and limit > 0 else None

    @property
    def tp_size(self) -> int:
        size = self.engine_args.get("tp_size", 1)
        return size if isinstance(size, int) and size > 0 else 1

    @property
    def takes_quantized(self) -> bool:
        return self.gpus_per_engine > 0 and self.quantization in (Quantization.fp8, Quantization.int8)

    def conflicts(self) -> Iterator[Problem]:
        yield from self._server_problems()
        kind = f"rollout.quantization={self.quantization.name}"
        if self.takes_quantized and self.dtype is DType.float32:
            rule = f"must be bfloat16 or float16 with {kind}: SGLang's 8-bit layers have no float32 output"
            yield self.broken("dtype", rule)
        tp_size = self.engine_args.get("tp_size", 1)
        if not isinstance(tp_size, int) or tp_size < 1:
            yield Problem(key="engine_args.tp_size", rule="must be an integer >= 1", value=tp_size)
        elif self.gpus_per_engine > tp_size:
            rule = f"must be rollout.gpus_per_engine ({self.gpus_per_engine:g}): an engine has one process per GPU"
            yield Problem(key="engine_args.tp_size", rule=rule, value=tp_size)
        for key, value in self.engine_args.items():
            if key in OWNED_SGLANG_ARGS:
                rule, remedy = "is set by Parity", "Remove it."
            elif key in QUANTIZED_SGLANG_ARGS and self.takes_quantized:
                rule, remedy = f"is set by Parity with {kind}", "Remove it, or use rollout.quantization=none."
            elif key in REFUSED_SGLANG_ARGS:
                rule, remedy = f"is refused: {REFUSED_SGLANG_ARGS[key]}", "Remove it."
            elif key in UNSUPPORTED_SGLANG_ARGS and value not in (None, False, 1):
                rule = "is not supported: the engine's weights could not be verified"
                remedy = "Remove it; there are more engines (rollout.num_engines) and rollout.quantization."
            else:
                continue
            yield Problem(key=f"engine_args.{key}", rule=rule, value=value, remedy=remedy)

    def _server_problems(self) -> Iterator[Problem]:
        """Yield broken rules about running servers (`servers`)."""
        if not self.servers:
            return
        if len(self.servers) != self.num_engines:
            yield self.broken(
                "num_engines",
                f"must be the number of rollout.servers ({len(self.servers)})",
                f"Set rollout.num_engines={len(self.servers)}.",
            )
        if len(set(self.servers)) != len(self.servers):
            yield self.broken("servers", "must name every server once")
        if self.engine_args or self.gpus_per_engine > 0:
            yield self.broken(
                "servers",
                "must be empty with engine_args or gpus_per_engine: those say how servers are started",
                "Remove them; whoever starts the servers chooses their options and GPUs.",
            )
        for server in self.servers:
            rule, remedy = _address_problem(server, allow_remote=self.allow_remote)
            if rule:
                yield Problem(key="servers", rule=rule, value=server, remedy=remedy)


def _address_problem(server: str, *, allow_remote: bool) -> tuple[str, str]:
    """(rule, remedy) of the rule that the address of a server breaks; empty texts if the address is valid."""
    try:
        parts = urlsplit(server)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return f"must be scheme, host and port: {error}", "For example http://127.0.0.1:30000."
    if parts.scheme not in ("http", "https") or not host or not port or parts.path.strip("/") or parts.query:
        return "must be scheme, host and port, nothing else", "For example http://127.0.0.1:30000."
    if parts.username or parts.password:
        return "must hold no key", "Set PARITY_SGLANG_API_KEY and PARITY_SGLANG_ADMIN_API_KEY in the environment."
    if host not in LOOPBACK and not allow_remote:
        return (
            "must be on this machine: prompts, responses, weights and keys would cross the network",
            "Set rollout.allow_remote=true if the network between is yours, and prefer https.",
        )
    return "", ""


@dataclass(kw_only=True, slots=True)
class TorchEngineConfig(EngineConfig):
    """The embedded engine: transformers in the worker's process, no server. Deterministic; the reference in tests."""

    kind: ClassVar[str] = "torch"
    max_batch_size: int = ruled(256, at_least(1))
    """Largest number of sequences decoded together; a waiting sequence takes the slot of a finished one."""

    @property
    def max_running(self) -> int | None:
        return self.max_batch_size


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
