"""vLLM 0.32 on a CPU, with its first model runner: Parity draws inside it (`rollout/vllm/sampler.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rollout.config import Routing
from rollout.vllm.engine import BLOCK_TOKENS, VLLMEngine
from rollout.vllm.releases import ON_CPU, Release
from rollout.weights.experts import mixture_of
from rollout.weights.quantization import round_inputs

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from rollout.vllm.decoding import Batch

STEP_TOKENS = 2048
"""Tokens of prompts that are read in a step, vLLM's own default."""


class CPUEngine(VLLMEngine):
    """Linear layers and experts multiply with the parameters that the model shows."""

    release: ClassVar[Release] = ON_CPU
    environment: ClassVar[Mapping[str, str]] = {
        **VLLMEngine.environment,
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the sampler stands in the first one
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the machine is shared
        "TORCHDYNAMO_DISABLE": "1",  # compiling took longer than it saves
    }

    def _launch(self, model_path: Path, described: Mapping[str, Any]) -> LLMEngine:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.layers import utils
        from vllm.v1.engine.llm_engine import LLMEngine

        from rollout.vllm.experts import RouteRecorder, use_plain_experts
        from rollout.vllm.sampler import SeededSampler

        def plain(layer: Any, remove_weight: bool) -> None:
            layer.cpu_linear = torch.nn.functional.linear

        # vLLM would pack the weights and leave empty parameters: nothing could be loaded or read back.
        utils.dispatch_cpu_unquantized_gemm = plain
        keeps_routes = self._setup.routes is not Routing.live and mixture_of(described) is not None
        recorder = RouteRecorder() if keeps_routes else None
        use_plain_experts(recorder)
        engine = LLMEngine.from_engine_args(EngineArgs(**self._arguments(model_path) | self._sizes(described)))
        runner = engine.model_executor.driver_worker.model_runner
        runner.sampler = SeededSampler(runner, recorder)
        round_inputs(runner.get_model(), self._config.quantization)
        return engine

    def _sizes(self, described: Mapping[str, Any]) -> dict[str, Any]:
        tokens = self._vllm.held_tokens
        assert tokens is not None
        return {
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": self._cache_bytes(described, tokens=tokens),
            "max_model_len": self._vllm.context_length(described),
            # A decode step takes a token of each.
            "max_num_batched_tokens": max(STEP_TOKENS, self._vllm.max_batch_size),
        }

    def _new_batch(self, model: LLMEngine, policy_version: int) -> Batch:
        from rollout.vllm.sampler import SeededBatch

        return SeededBatch(model, num_slots=self._vllm.max_batch_size, policy_version=policy_version)
