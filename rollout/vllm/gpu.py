"""vLLM 0.33 on a GPU of its own, or on a share of one, with Model Runner V2: vLLM's kernels compute, cut and draw.

Not yet run on a GPU: read against vLLM 0.33, whose own code resolves the arguments and draws on a CPU in
tests/rollout/test_vllm_gpu.py. Weights come from the memory that all engines of the machine share, straight into the
parameters; an engine that sleeps (`sleep(2)`) gives up weights and cache, and keeps their addresses, so that graphs
stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rollout.embedded.engine import Part
from rollout.engine import EngineError
from rollout.types import PackedWeights
from rollout.vllm.engine import VLLMEngine
from rollout.vllm.releases import ON_GPU, Release

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from rollout.vllm.decoding import Batch

STEP_TOKENS = 8192
"""Tokens of prompts that are read in a step."""
WEIGHTS, CACHE = "weights", "kv_cache"
"""What vLLM wakes by itself; the rest of its memory comes back with the first of them."""
WHOLE_SLEEP = 2
"""The level of a sleep that keeps no copy of the weights."""


class GPUEngine(VLLMEngine):
    """One GPU, in the process of the worker."""

    release: ClassVar[Release] = ON_GPU
    environment: ClassVar[Mapping[str, str]] = {**VLLMEngine.environment, "VLLM_USE_V2_MODEL_RUNNER": "1"}

    def _launch(self, model_path: Path, described: Mapping[str, Any]) -> LLMEngine:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        engine = LLMEngine.from_engine_args(EngineArgs(**self.engine_args(model_path, described)))
        # From now on only the check of new requests reads it, which would refuse those of an evaluation: greedy ones,
        # and those without top_k. `ReportedBatch` asks the sampler for supports where a step needs them.
        engine.model_config.return_sampling_mask = False
        return engine

    def engine_args(self, model_path: Path, described: Mapping[str, Any]) -> dict[str, Any]:
        """The EngineArgs of vLLM 0.33."""
        sleeps, tokens = self._setup.sleeps, self._vllm.held_tokens
        if tokens is None:
            tokens = self._setup.cache_tokens  # of the engine in whose place it is, beside ranks that have grown
        memory: dict[str, Any] = {"gpu_memory_utilization": self._vllm.memory_share(sleeps=sleeps)}
        if tokens is not None:  # then vLLM measures nothing, but wants the share to be free
            memory = {
                "gpu_memory_utilization": 0.01,
                "kv_cache_memory_bytes": self._cache_bytes(described, tokens=tokens),
            }
        return {
            **self._arguments(model_path),
            **memory,
            "max_model_len": -1,  # as long as the model and the cache allow
            "max_num_batched_tokens": max(STEP_TOKENS, self._vllm.max_batch_size),
            "distributed_executor_backend": "uni",  # in this process, also inside a placement group of Ray
            "logprobs_mode": "processed_logprobs",  # after temperature and truncation
            "return_sampling_mask": True,
            "enable_sleep_mode": sleeps,
            "sleep_mode_offload_cudagraph": sleeps,
            "seed": self._setup.seed + self._setup.index,
        }

    def _new_batch(self, model: LLMEngine, policy_version: int) -> Batch:
        from rollout.vllm.reported import ReportedBatch

        return ReportedBatch(model, num_slots=self._vllm.max_batch_size, policy_version=policy_version)

    def _parts(self, weights: PackedWeights) -> list[Part]:
        if self._sleeps(WEIGHTS):
            raise EngineError(f"{self._name} load_weights: the engine sleeps, and its weights have no memory; wake it")
        return super()._parts(weights)

    def _renewed(self) -> LLMEngine:
        if self._sleeps(CACHE):  # only now, so that a rank that still sends has room
            self._started("load_weights").wake_up([CACHE])
        return super()._renewed()

    def sleep(self) -> None:
        """Give up weights and cache: generate() refuses until the next sync."""
        super().sleep()
        if self._setup.sleeps and not self._sleeps(WEIGHTS):
            self._broken = "they were given up while the engine slept"
            self._started("sleep").sleep(WHOLE_SLEEP)

    def wake(self) -> None:
        """Take the memory of the weights; that of the cache follows when they are loaded."""
        if self._sleeps(WEIGHTS):
            self._started("wake").wake_up([WEIGHTS])
        super().wake()

    def _sleeps(self, tag: str) -> bool:
        return tag in self._started("sleep").model_executor.sleeping_tags
