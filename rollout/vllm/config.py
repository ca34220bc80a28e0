"""Configuration of the engine `rollout=vllm`, and what it refuses. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from algorithms.config import Problem
from algorithms.config.rules import at_least, ruled
from rollout.config import EngineConfig, EngineUse, PauseMode, pause_problems
from rollout.embedded.config import EmbeddedConfig
from rollout.weights.experts import BIASED

if TYPE_CHECKING:
    from rollout.engine import Engine, EngineSetup

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of a head that vLLM's attention has on a CPU; with others it starts, and fails at the first request."""


@dataclass(kw_only=True, slots=True)
class VLLMConfig(EmbeddedConfig):
    """vLLM's own engine in the worker's process, on a CPU: no server."""

    kind: ClassVar[str] = "vllm"
    package: ClassVar[str] = "vllm"
    package_remedy: ClassVar[str] = "make setup ENGINE=vllm in the checkout, or use rollout=sglang or rollout=torch"
    route_number_bytes: ClassVar[int] = 4  # with the factor
    pause_mode: PauseMode = PauseMode.retract
    """Treatment of unfinished responses while weights are replaced. Vetted: retract."""
    cache_tokens: int = ruled(65536, at_least(64, "tokens"))
    """Number of tokens whose keys and values the engine can hold; no response with its prompt may be longer."""

    def conflicts(self) -> Iterator[Problem]:
        if self.gpus_per_engine > 0:
            rule = "must be 0 with rollout=vllm, which runs vLLM on a CPU alone so far"
            yield self.broken("gpus_per_engine", rule, "Use rollout=sglang on GPUs.")
        if self.exact:
            rule = "must be false with rollout=vllm: vLLM's own kernels compute, and have no exact form"
            yield self.broken("exact", rule, "Use rollout=torch or rollout=sglang.")

    def use_problems(self, use: EngineUse) -> Iterator[Problem]:
        yield from pause_problems(self.pause_mode, use)
        if use.sends_adapter:
            rule = "must be true with rollout=vllm: an adapter that is sent by itself could not be verified there"
            yield Problem(key="policy.lora.merge", rule=rule, value=False, remedy="Set it.")

    def context_length(self, model: Mapping[str, Any]) -> int | None:
        length = EngineConfig.context_length(self, model)
        return self.cache_tokens if length is None else min(length, self.cache_tokens)

    def model_rule(self, model: Mapping[str, Any]) -> str:
        if model.get("model_type") in BIASED:
            return f"be of another family than {' and '.join(BIASED)} with rollout=vllm, which has not served them yet"
        if model.get("model_type") == "olmoe" and (
            model.get("norm_topk_prob") or model.get("clip_qkv") is not None or model.get("rms_norm_eps", 1e-5) != 1e-5
        ):
            return "have norm_topk_prob=false, no clip_qkv and rms_norm_eps=1e-5, as the OLMoE of rollout=vllm"
        rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
        if (rope.get("rope_type") or rope.get("type")) in ("longrope", "su"):
            return "have other positions than longrope with rollout=vllm, which takes the factors of long texts for all"
        heads, width = model.get("num_attention_heads"), model.get("hidden_size")
        size = model.get("head_dim") or (width // heads if heads and width else None)
        if size is not None and size not in HEAD_SIZES:
            return f"have heads of {', '.join(map(str, HEAD_SIZES))} numbers with rollout=vllm, not of {size}"
        return ""

    def build(self, setup: EngineSetup) -> Engine:
        from rollout.vllm.engine import VLLMEngine

        return VLLMEngine(self, setup)
