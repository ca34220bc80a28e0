"""A rollout engine as a user writes one, plain transformers without a cache: `rollout=path/to/toy_engine.py:ToyEngine`.

tests/rollout/test_engine_contract.py says what an engine must do, and tries this one beside the built-in ones.
"""

import copy
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from algorithms.config import Problem
from algorithms.config.rules import at_least, ruled
from algorithms.truncation import kept_tokens
from rollout import engine
from rollout.config import CustomEngine, EngineUse
from rollout.supports import joined, supports_of
from rollout.types import Completion, FinishReason, GenerateRequest, PackedWeights
from rollout.weights.packed_weights import DTYPES, check_weights, tensor_digest, unpack


@dataclass(kw_only=True)
class ToyEngine(CustomEngine):
    """Reads prompt and response anew for every token."""

    max_batch_size: int = ruled(256, at_least(1))
    """Largest number of sequences that get a token together."""

    def use_problems(self, use: EngineUse) -> Iterator[Problem]:
        if use.sends_adapter:
            yield Problem(key="policy.lora.merge", rule="must be true: ToyEngine knows no adapter", value=False)

    def build(self, setup: engine.EngineSetup) -> engine.Engine:
        return Toy(self, setup)


class Toy(engine.Engine):
    """Samples only while somebody polls: between two tokens any other call gets the lock."""

    policy_version = 0
    sampling_s = 0.0

    def __init__(self, config: ToyEngine, setup: engine.EngineSetup) -> None:
        self._config, self._setup, self._lock = config, setup, Lock()
        self._jobs: dict[int, GenerateRequest] = {}
        """Ticket -> request, which is resumed with every token."""
        self._done: list[Completion] = []

    def start(self, model_path: Path) -> engine.EngineInfo:
        begin, dtype = time.monotonic(), DTYPES[self._config.dtype.name]
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, local_files_only=True)
        self._model.eval().requires_grad_(False).to(self._setup.device)
        return engine.EngineInfo(name="toy 1", address="embedded", pids=(), start_s=time.monotonic() - begin)

    def submit(self, tickets: Sequence[int], requests: Sequence[GenerateRequest]) -> None:
        config, jobs = self._model.config, {}
        for ticket, request in zip(tickets, requests, strict=True):
            limits = {"vocab_size": config.vocab_size, "context_length": config.max_position_embeddings}
            if problem := engine.request_problem(request, **limits):
                raise ValueError(f"prompt {request.prompt_id}/{request.sample_index}: {problem}")
            jobs[ticket] = replace(request, resumed=copy.deepcopy(request.resumed or engine.aborted(request)))
        with self._lock:
            self._jobs |= jobs

    def poll(self, timeout_s: float) -> list[Completion]:
        end = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._jobs and not self._done:
                    self._sample(list(self._jobs.items())[: self._config.max_batch_size])
                found, self._done = self._done, []
            if found or time.monotonic() >= end:
                return found
            time.sleep(0.001)

    @torch.inference_mode()
    def _sample(self, jobs: list[tuple[int, GenerateRequest]]) -> None:
        """One token for each."""
        begin, device = time.monotonic(), self._setup.device
        texts = [torch.tensor(job.prompt_token_ids + job.resumed.token_ids, device=device) for _, job in jobs]
        ends = torch.tensor([len(text) - 1 for text in texts], device=device)
        padded = pad_sequence(texts, batch_first=True)  # no token sees those after it
        logits = self._model(input_ids=padded, use_cache=False).logits[torch.arange(len(jobs), device=device), ends]
        for (ticket, job), scores in zip(jobs, logits.double().cpu(), strict=True):
            sampling, response = job.sampling, job.resumed
            logprobs = torch.log_softmax(scores / (sampling.temperature or 1.0), dim=-1)
            top_k = 1 if sampling.temperature == 0 else sampling.top_k if sampling.top_k > 0 else len(logprobs)
            limits = {"top_k": top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
            kept = kept_tokens(logprobs.exp()[None], **{name: torch.tensor([x]) for name, x in limits.items()})[0]
            if sampling.temperature:  # a greedy token has the log-prob that it has at temperature 1
                logprobs = torch.log_softmax(logprobs.masked_fill(~kept, -torch.inf), dim=-1)
            mass = (logprobs.exp() * kept).cumsum(0)
            # A number of its own for every place: a resumed response goes on as if it had not ended.
            draw = random.Random(f"{sampling.seed} {len(response.token_ids)}").random()
            token = int(torch.searchsorted(mass, draw * mass[-1], right=True))
            if sampling.with_supports:
                response.supports = joined([response.supports_or_empty, supports_of([kept.nonzero().flatten()])])
            response.token_ids.append(token)
            response.logprobs.append(float(logprobs[token]))
            response.token_versions.append(self.policy_version)
            if token in sampling.stop_token_ids:
                self._end([ticket], FinishReason.stop)
            elif len(response.token_ids) == sampling.max_new_tokens:
                self._end([ticket], FinishReason.length)
        self.sampling_s += time.monotonic() - begin

    def _end(self, tickets: Iterable[int], reason: FinishReason) -> None:
        for ticket in tickets:
            self._done.append(Completion(ticket, replace(self._jobs.pop(ticket).resumed, finish_reason=reason)))

    def abort(self, tickets: Sequence[int] | None) -> None:
        with self._lock:
            self._end(self._jobs.keys() & (self._jobs if tickets is None else tickets), FinishReason.abort)

    def load_weights(self, weights: PackedWeights) -> engine.WeightReport:
        begin, version = time.monotonic(), weights.policy_version
        check_weights(weights, held_version=self.policy_version)
        held = dict(self._model.named_parameters())
        if other := held.keys() ^ {spec.name for spec in weights.tensors}:
            raise engine.WeightSyncError(f"toy: policy version {version} and engine do not both have {sorted(other)}")
        with self._lock:
            for spec, tensor in unpack(weights):
                held[spec.name].copy_(tensor)
                if tensor_digest(held[spec.name]) != spec.digest:
                    raise engine.WeightSyncError(f"toy: {spec.name} is not as policy version {version} has it")
            self.policy_version = version
        counts = {"num_tensors": len(weights.tensors), "num_bytes": weights.data.nbytes}
        return engine.WeightReport(policy_version=version, **counts, load_s=time.monotonic() - begin, verify_s=0.0)

    def sleep(self) -> None:
        if self._jobs:
            raise engine.EngineError(f"toy sleep: {len(self._jobs)} requests are unfinished")
        self._model.to("cpu")

    def wake(self) -> None:
        self._model.to(self._setup.device)

    def stop(self) -> None:
        self._jobs, self._model = {}, None
