"""What is drawn inside vLLM: Parity's law, with Parity's draws, in the place of vLLM's sampler.

vLLM cuts top-p among what top-k leaves, reports no supports on a CPU, and draws with generators whose state depends on
the number of draws: a response that goes on after an abort would not be the one that was never ended. Read against
vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput

from rollout.embedded.batch import Response
from rollout.embedded.drawing import add_drawn, sample_tokens, truncation_of
from rollout.vllm.decoding import Batch
from rollout.vllm.experts import RouteRecorder

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.llm_engine import LLMEngine


class SeededSampler:
    """Stands where vLLM's model runner has its sampler, and adds what it draws to the responses."""

    def __init__(self, runner: Any, recorder: RouteRecorder | None) -> None:
        self._runner = runner
        self._recorder = recorder
        self.responses: dict[str, Response] = {}
        """vLLM's name of a request -> its response so far."""
        self.policy_version = 0
        """Version of the tokens that are drawn."""

    def reset(self, policy_version: int) -> None:
        """Forget all responses, and what a step that failed has recorded."""
        self.responses.clear()
        self.policy_version = policy_version
        if self._recorder is not None:
            self._recorder.forget()

    def __call__(self, logits: Tensor, sampling_metadata: object) -> SamplerOutput:
        """Draw a token for every row of `logits` [B, V]; rows of prompts that are read in part draw in vain."""
        responses = [self.responses[name] for name in self._runner.input_batch.req_ids]
        params = [each.request.sampling for each in responses]
        drawn = sample_tokens(
            logits,
            temperature=torch.tensor([each.temperature for each in params]),
            seeds=torch.tensor([each.seed for each in params]),
            positions=torch.tensor([each.length - 1 for each in responses]),
            truncation=truncation_of(params, logits),
        )
        ready = (~torch.from_numpy(self._runner.discard_request_mask.np[: len(responses)])).nonzero()[:, 0]
        if self._recorder is not None:
            self._recorder.add_routes(self._runner, responses, ready.tolist())
        add_drawn(drawn.rows(ready), [responses[row] for row in ready.tolist()], policy_version=self.policy_version)
        return SamplerOutput(sampled_token_ids=drawn.tokens.to(torch.int32)[:, None], logprobs_tensors=None)


class SeededBatch(Batch):
    """Lets the sampler find the responses by vLLM's names of their requests."""

    def __init__(self, engine: LLMEngine, *, num_slots: int, policy_version: int) -> None:
        super().__init__(engine, num_slots=num_slots, policy_version=policy_version)
        # vLLM's kernels ask OpenMP, which has a number for each thread: that of all cores, until torch sets it.
        torch.set_num_threads(torch.get_num_threads())
        self._sampler: SeededSampler = engine.model_executor.driver_worker.model_runner.sampler
        self._sampler.reset(policy_version)

    def _take(self, response: Response, part: CompletionOutput) -> None:
        """The sampler has appended it."""

    def _begin(self, response: Response) -> None:
        super()._begin(response)
        self._sampler.responses[self._names[response.ticket]] = response

    def renew(self, model: LLMEngine, policy_version: int) -> None:
        self._sampler.policy_version = policy_version
        super().renew(model, policy_version)

    def _release(self, ended: Sequence[Response]) -> None:
        for response in ended:
            del self._sampler.responses[self._names[response.ticket]]
        super()._release(ended)
