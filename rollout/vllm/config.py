"""Configuration of the engine `rollout=vllm`, and what it refuses. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from algorithms.config import Problem
from algorithms.config.rules import Rule, at_least, ruled
from rollout.config import EngineConfig, EngineUse, PauseMode, Quantization, pause_problems
from rollout.embedded.config import EmbeddedConfig
from rollout.model.text_part import rope_length
from rollout.weights.experts import BIASED, FAMILIES

if TYPE_CHECKING:
    from rollout.engine import Engine, EngineSetup
    from rollout.processes.gpu_host import Lack

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of a head that vLLM's attention has on a CPU; with others it starts, and fails at the first request."""
TEMPERATURES = Rule("must be 0.01 to 2 with rollout=vllm on a GPU, as vLLM takes it", lambda value: 0.01 <= value <= 2)
SLEEPING_SHARE = 0.85
"""Share of a GPU that an engine takes for everything while the rank sleeps. Not yet run."""
OWN_SHARE = 0.9
"""The most that an engine takes of a GPU, the share of vLLM's own default; its context and libraries come on top."""
CONTEXT_BYTES = 2**30
"""Memory of a GPU that vLLM's share does not count: the context and libraries of the process. A guess."""


@dataclass(kw_only=True, slots=True)
class VLLMConfig(EmbeddedConfig):
    """vLLM's own engine in the worker's process: no server. On a GPU not yet run."""

    kind: ClassVar[str] = "vllm"
    package: ClassVar[str] = "vllm"
    package_remedy: ClassVar[str] = "make setup ENGINE=vllm in the checkout, or use rollout=sglang or rollout=torch"
    route_number_bytes: ClassVar[int] = 4  # with the factor
    graph_bytes: ClassVar[int] = 2 * 2**30  # a guess, as the next: not measured
    work_bytes: ClassVar[int] = 4 * 2**30
    cpu_cache_tokens: ClassVar[int] = 65536
    pause_mode: PauseMode = PauseMode.retract
    """Treatment of unfinished responses while weights are replaced. Vetted: retract."""
    cache_tokens: int | None = ruled(None, at_least(64, "tokens"))
    """Number of tokens whose keys and values the engine can hold; no response with its prompt may be longer. null takes
    65,536 on a CPU, and on a GPU what the engine's share of the memory has room for."""

    @property
    def held_tokens(self) -> int | None:
        return self.cpu_cache_tokens if self.cache_tokens is None and not self.gpus_per_engine else self.cache_tokens

    def conflicts(self) -> Iterator[Problem]:
        if self.gpus_per_engine > 1:
            rule = "must be at most 1 with rollout=vllm: an engine computes in the worker's process, on one GPU"
            remedy = "Take more engines (rollout.num_engines), or rollout=sglang with rollout.engine_args.tp_size."
            yield self.broken("gpus_per_engine", rule, remedy)
        if self.gpus_per_engine and self.quantization is not Quantization.none:
            rule = "must be none with rollout=vllm on a GPU: its compiled layers do not round their inputs"
            yield self.broken("quantization", rule, "Use rollout=sglang, or rollout=torch.")
        if self.exact:
            rule = "must be false with rollout=vllm: vLLM's own kernels compute, and have no exact form"
            yield self.broken("exact", rule, "Use rollout=torch or rollout=sglang.")

    def use_problems(self, use: EngineUse) -> Iterator[Problem]:
        yield from pause_problems(self.pause_mode, use)
        if use.sends_adapter:
            rule = "must be true with rollout=vllm: an adapter that is sent by itself could not be verified there"
            yield Problem(key="policy.lora.merge", rule=rule, value=False, remedy="Set it.")
        drawn = {"sampling.temperature": use.sampling.temperature, "eval.temperature": use.eval_temperature}
        for key, value in drawn.items() if self.gpus_per_engine else ():
            if value is not None and not TEMPERATURES.holds(value):
                yield Problem(key=key, rule=TEMPERATURES.text, value=value, remedy="Or use rollout=sglang.")

    def gpu_lacks(self, *, sleeps: bool) -> list[Lack]:
        from rollout.processes.gpu_host import Lack, triton_lacks
        from rollout.vllm.releases import ON_GPU

        missing = [] if ON_GPU.is_installed else [Lack(f"there is no package {ON_GPU}", f"{ON_GPU.remedy}.")]
        return [*missing, *triton_lacks()]

    def memory_share(self, *, sleeps: bool) -> float:
        """Share of its GPU that an engine takes for weights, cache, graphs and activations, if its cache has no size of
        its own; `sleeps`: it is there alone."""
        return SLEEPING_SHARE if sleeps else min(self.gpu_share, OWN_SHARE)

    def taken_bytes(self, gpu_bytes: int) -> int | None:
        return None if self.held_tokens else int(self.memory_share(sleeps=False) * gpu_bytes) + CONTEXT_BYTES

    def static_bytes(self, gpu_bytes: int, *, held: int, sleeps: bool) -> int:
        return max(0, int(self.memory_share(sleeps=sleeps) * gpu_bytes) - self.work_bytes)

    def context_length(self, model: Mapping[str, Any]) -> int | None:
        known = [
            length for length in (EngineConfig.context_length(self, model), self.held_tokens) if length is not None
        ]
        return min(known, default=None)

    def model_rule(self, model: Mapping[str, Any]) -> str:
        on_gpu, family = self.gpus_per_engine > 0, model.get("model_type")
        if family in BIASED:
            return f"be of another family than {' and '.join(BIASED)} with rollout=vllm, which has not served them yet"
        if on_gpu and family in FAMILIES:
            return "be dense with rollout=vllm on a GPU, where vLLM may hold experts in an order of its kernels"
        if family == "olmoe" and (
            model.get("norm_topk_prob") or model.get("clip_qkv") is not None or model.get("rms_norm_eps", 1e-5) != 1e-5
        ):
            return "have norm_topk_prob=false, no clip_qkv and rms_norm_eps=1e-5, as the OLMoE of rollout=vllm"
        if rope_length(model)[1] in ("longrope", "su"):
            return "have other positions than longrope with rollout=vllm, which takes the factors of long texts for all"
        heads, width = model.get("num_attention_heads"), model.get("hidden_size")
        size = model.get("head_dim") or (width // heads if heads and width else None)
        if size is not None and size not in HEAD_SIZES and not on_gpu:
            return f"have heads of {', '.join(map(str, HEAD_SIZES))} numbers with rollout=vllm, not of {size}"
        return ""

    def build(self, setup: EngineSetup) -> Engine:
        from rollout.vllm.cpu import CPUEngine
        from rollout.vllm.gpu import GPUEngine

        return (CPUEngine if setup.device == "cpu" else GPUEngine)(self, setup)
