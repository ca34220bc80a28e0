"""The requests of vLLM's engine on a GPU: vLLM's own sampler draws, and reports tokens, log-probs and supports.

Its noise is made of the seed of a request and the place of the token in the text, so a response that goes on after an
abort is the one that was never ended. Not yet run on a GPU. Read against vLLM 0.33, Model Runner V2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.embedded.batch import Response
from rollout.types import GenerateRequest
from rollout.vllm.decoding import Batch

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine


class ReportedBatch(Batch):
    """Takes what vLLM reports of a step, all of which was computed with the weights of now."""

    def __init__(self, engine: LLMEngine, *, num_slots: int, policy_version: int) -> None:
        super().__init__(engine, num_slots=num_slots, policy_version=policy_version)
        self._sampler: Any = engine.model_executor.driver_worker.model_runner.sampler

    def _step(self) -> list[RequestOutput]:
        # For all rows of a step or for none: the support of a row without truncation is the whole vocabulary.
        self._sampler.return_sampling_mask = any(each.request.sampling.with_supports for each in self.active)
        return super()._step()

    def _law(self, request: GenerateRequest) -> dict[str, Any]:
        sampling = request.sampling
        return {
            "temperature": sampling.temperature,
            "top_k": max(sampling.top_k, 0),
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "logprobs": 0,  # of the drawn token alone
        }

    def _take(self, response: Response, part: CompletionOutput) -> None:
        for token, laws in zip(part.token_ids, part.logprobs or (), strict=True):
            response.tokens.append(token)
            response.logprobs.append(laws[token].logprob)
            response.versions.append(self._version)
        # Without one the collector drops the sample, and counts it.
        if response.request.sampling.with_supports and part.sampling_mask is not None:
            response.supports += [np.array(kept, np.int32) for kept in part.sampling_mask.token_ids]
