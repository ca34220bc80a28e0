"""Configuration of the SGLang engine, `rollout=sglang`: its keys, and all that it asks of a run and of a machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from urllib.parse import urlsplit

from algorithms.config import Problem
from algorithms.config.home import MAY_NAME_PATHS
from rollout.config import (
    LOOPBACK,
    DType,
    EngineConfig,
    EngineUse,
    PauseMode,
    Quantization,
    SamplingConfig,
    pause_problems,
)
from rollout.sglang.options import MAX_REPLY_BYTES, SGLANG_REMEDY, SLEEPING_SHARE
from rollout.weights.experts import FAMILIES, is_all_sparse

if TYPE_CHECKING:
    from rollout.engine import Engine, EngineSetup
    from rollout.processes.gpu_host import Lack

OWNED_SGLANG_ARGS = frozenset({
    "model_path", "tokenizer_path", "host", "port", "api_key", "admin_api_key", "dtype", "device",
    "skip_tokenizer_init", "random_seed", "trust_remote_code", "sleep_on_idle", "log_level", "custom_weight_loader",
    "disable_shared_experts_fusion", "weight_version",
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
INEXACT_ENGINE_ARGS = frozenset(
    {
        "attention_backend", "decode_attention_backend", "prefill_attention_backend", "sampling_backend",
        "disable_cuda_graph", "enable_fp32_lm_head", "kv_cache_dtype", "enable_deterministic_inference",
        "rl_on_policy_target",
    }
)  # fmt: skip
"""Options of SGLang that change what a token is computed with."""
MOST_KEPT = 2048
"""Largest sampling.top_k with SGLang 0.5.23. It returns 4,096 kept tokens, and equal probabilities may add some."""
KEPT_TOKEN_BYTES = 7
"""Bytes of an id in a reply: at most six digits and a comma."""
ENGINE_BYTES = 6 * 2**30
"""Memory of SGLang on a GPU besides weights and cache: graphs of up to 1,024 requests, workspaces, a prefill's
activations, its context. Calculated, not yet measured."""
OWN_GPU_RESERVE, OWN_GPU_RESERVE_SHARE = 10 * 2**30, 0.3
"""What SGLang leaves free of a GPU of its own: so many bytes of one with 60 GiB and more, about this share of a small
one (arg_groups/memory_hook.py of SGLang 0.5.23)."""
GRAPH_BYTES = 5 * 2**29
"""Memory of the host in which SGLang keeps its decode graphs, for each of its GPUs, if it sleeps. Calculated, not yet
measured."""


@dataclass(kw_only=True, slots=True)
class SGLangConfig(EngineConfig):
    """A real SGLang server per rollout worker, over loopback HTTP."""

    kind: ClassVar[str] = "sglang"
    package: ClassVar[str] = "sglang"
    package_remedy: ClassVar[str] = SGLANG_REMEDY
    graph_bytes: ClassVar[int] = GRAPH_BYTES
    route_number_bytes: ClassVar[int] = 4
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
    def returns_routes(self) -> bool:
        return not self.servers  # Parity repairs the routes of retracted requests in the servers that it starts

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

    def use_problems(self, use: EngineUse) -> Iterator[Problem]:
        if self.exact:
            yield from self._exact_problems(use)
        if self.servers and use.sends_adapter:
            yield Problem(
                key="policy.lora.merge",
                rule="must be true with rollout.servers: servers that Parity did not start have no adapter to be "
                "verified",
                value=False,
                remedy="Set it, or let Parity start the servers (rollout.servers=[]).",
            )
        if self.servers and not use.trains:
            # A sync from ranks verifies weights, and an evaluation has no ranks.
            rule = "must be empty in an evaluation: what those servers hold could be other weights"
            yield self.broken("servers", rule, "Leave it out: engines are started for the evaluation.").under("rollout")
        yield from pause_problems(self.pause_mode, use)
        yield from _truncation_problems(use.sampling)

    def _exact_problems(self, use: EngineUse) -> Iterator[Problem]:
        """Yield what of SGLang has no exact form."""
        if self.servers:
            rule = "must be [] with rollout.exact=true: only a server that Parity starts computes in exact arithmetic"
            yield self.broken("servers", rule, "Remove it, or set rollout.exact=false.").under("rollout")
        if self.tp_size > 1:
            rule = "must be 1 with rollout.exact=true: ranks would add up their parts in an order of their own"
            yield Problem(key="rollout.engine_args.tp_size", rule=rule, value=self.tp_size, remedy="Remove it.")
        for name in sorted(INEXACT_ENGINE_ARGS & self.engine_args.keys()):
            key, value = f"rollout.engine_args.{name}", self.engine_args[name]
            rule = "must not be set with rollout.exact=true: Parity decides what the server computes with"
            yield Problem(key=key, rule=rule, value=value, remedy="Remove it, or set rollout.exact=false.")
        if rank := use.lora_rank:
            rule = (
                "must be 0 with rollout=sglang and rollout.exact=true: SGLang adds an adapter with kernels of its own"
            )
            yield Problem(key="policy.lora.rank", rule=rule, value=rank, remedy="Set it, or use rollout=torch.")

    def gpu_lacks(self, *, sleeps: bool) -> list[Lack]:
        from rollout.sglang.cuda_host import engine_lacks

        return engine_lacks(sleeps=sleeps)

    def context_length(self, model: Mapping[str, Any]) -> int | None:
        if self.servers or any("factor" in (model.get(key) or {}) for key in ("rope_scaling", "rope_parameters")):
            return None
        return self.engine_args.get("context_length", EngineConfig.context_length(self, model))

    def model_rule(self, model: Mapping[str, Any]) -> str:
        heads = model.get("num_attention_heads")
        if isinstance(heads, int) and heads % self.tp_size:
            fit = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
            size = f"rollout.engine_args.tp_size={self.tp_size}"
            return f"have a number of heads that {size} divides, not {heads}, for which {fit} would do"
        if model.get("model_type") not in FAMILIES:
            return ""
        if model["model_type"] == "deepseek_v3":
            return (
                "be of another family than deepseek_v3 with rollout=sglang, which multiplies with matrices made of "
                "kv_b_proj, that no digest covers, and has no such attention on a CPU"
            )
        if not is_all_sparse(model):
            return "have experts in every layer with rollout=sglang, which gives none a dense one (mlp_only_layers)"
        if model.get("tie_word_embeddings"):
            return "have a head of its own with rollout=sglang, whose mixtures tie none (tie_word_embeddings)"
        if model["model_type"] == "olmoe" and model.get("norm_topk_prob"):
            return "have norm_topk_prob=false with rollout=sglang, whose OLMoE weighs experts so"
        if self.engine_args.get("enable_hierarchical_cache"):
            return "be dense with engine_args.enable_hierarchical_cache, which loses the routes of tokens"
        if self.takes_quantized:
            return (
                f"be dense with rollout.quantization={self.quantization.name} on a GPU: experts are not quantised yet"
            )
        return ""

    def adapter_rule(self, chosen: Iterable[str], *, among: Iterable[str]) -> str:
        from rollout.weights.stacked import parts_apart  # with numpy, which a completion needs not load

        apart = parts_apart(chosen, among=among)
        return f"must choose {apart} in all layers or none: SGLang holds them as one matrix" if apart else ""

    def taken_bytes(self, gpu_bytes: int) -> int | None:
        return int(self.engine_args.get("mem_fraction_static", self.gpu_share) * gpu_bytes) + ENGINE_BYTES

    def static_bytes(self, gpu_bytes: int, *, held: int, sleeps: bool) -> int:
        own = 1 - min(OWN_GPU_RESERVE / gpu_bytes, OWN_GPU_RESERVE_SHARE)
        share = SLEEPING_SHARE if sleeps else min(self.gpu_share, own)
        return int(self.engine_args.get("mem_fraction_static", share) * (gpu_bytes - held))

    def build(self, setup: EngineSetup) -> Engine:
        from rollout.sglang.engine import SGLangEngine

        return SGLangEngine(
            self,
            index=setup.index,
            seed=setup.seed,
            device=setup.device,
            log_dir=setup.log_dir,
            num_threads=setup.num_threads,
            needs=setup,
        )


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


def _truncation_problems(sampling: SamplingConfig) -> Iterator[Problem]:
    """Yield the truncation of which a server could not return the kept tokens."""
    fitting = min(MOST_KEPT, MAX_REPLY_BYTES // (KEPT_TOKEN_BYTES * sampling.max_new_tokens))
    if sampling.is_truncated and not 2 <= sampling.top_k <= fitting:
        rule = f"must be 2 to {fitting} with truncated sampling (sampling.top_p, sampling.min_p) and rollout=sglang: a "
        rule += f"server returns so many kept tokens for each of sampling.max_new_tokens={sampling.max_new_tokens}"
        remedy = f"Set sampling.top_k={min(256, fitting)}, remove sampling.top_p and min_p, or use rollout=torch."
        yield Problem(key="sampling.top_k", rule=rule, value=sampling.top_k, remedy=remedy)
