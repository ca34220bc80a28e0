"""The requests of vLLM's engine: each is handed over as its turn comes, and ends when vLLM says so."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from rollout.embedded import batch as embedded
from rollout.embedded.batch import Response
from rollout.engine import continuation
from rollout.types import Completion, GenerateRequest

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine


class Batch(embedded.Batch["LLMEngine"]):
    """The requests that vLLM has, and those that wait. vLLM's scheduler decides which it reads in a step."""

    def __init__(self, engine: LLMEngine, *, num_slots: int, policy_version: int) -> None:
        super().__init__(engine, num_slots=num_slots, policy_version=policy_version)
        self._responses: dict[int, Response] = {}
        self._names: dict[int, str] = {}
        """Ticket -> vLLM's own name of the request."""
        # Of a thread that failed or was stopped.
        engine.abort_request(list(engine.output_processor.request_states), internal=True)

    @property
    def active(self) -> Collection[Response]:
        return self._responses.values()

    def advance(self) -> list[Completion]:
        for response in self._next(self._num_slots - self.num_active):
            self._begin(response)
        completions, ended = [], []
        for output in self._step() if self._responses else ():
            response = self._responses[int(output.request_id)]
            [part] = output.outputs
            self._take(response, part)
            if len(response.versions) == len(part.token_ids):  # its first tokens
                response.shared_tokens = min(output.num_cached_tokens or 0, len(response.request.prompt_token_ids))
            reason = response.finish_reason()
            if list(part.token_ids) != response.tokens[-1:] or (reason is not None) is not output.finished:
                raise RuntimeError(
                    f"vLLM goes on with {part.token_ids} (finish reason {part.finish_reason}), where "
                    f"{response.tokens[-1:]} was drawn ({reason})"
                )
            if reason is not None:
                completions.append(response.completion(reason))
                ended.append(response)
        self._release(ended)
        return completions

    def _step(self) -> list[RequestOutput]:
        return self._model.step()

    @abstractmethod
    def _take(self, response: Response, part: CompletionOutput) -> None:
        """Append what vLLM drew in a step to the response, if it is not there."""

    def _law(self, request: GenerateRequest) -> dict[str, Any]:
        """What vLLM's own sampler must know of a request, as its SamplingParams name it."""
        return {}

    def _begin(self, response: Response) -> None:
        """Hand a request over to vLLM."""
        request = continuation(response.request)
        params = SamplingParams(
            max_tokens=request.sampling.max_new_tokens,
            stop_token_ids=list(request.sampling.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            **self._law(request),
        )
        # Prompts are read once for each version, also where the cache of an older version stays (pause_mode=in_place).
        prompt = {"prompt_token_ids": request.prompt_token_ids, "cache_salt": str(self._version)}
        self._responses[response.ticket] = response
        self._names[response.ticket] = self._model.add_request(str(response.ticket), prompt, params)

    def renew(self, model: LLMEngine, policy_version: int) -> None:
        """The engine has made vLLM forget its cache, unless rollout.pause_mode=in_place."""
        self._model, self._version = model, policy_version
        # What has no token yet is handed over anew: with its salt it would find the cache of the older version.
        unread = [response for response in self._responses.values() if not response.versions]
        self._release(unread)
        for response in unread:
            self._begin(response)

    def _release(self, ended: Sequence[Response]) -> None:
        self._model.abort_request([self._names.pop(response.ticket) for response in ended], internal=True)
        for response in ended:
            del self._responses[response.ticket]
