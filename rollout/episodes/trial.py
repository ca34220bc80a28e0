"""A trial of a rollout function before a run: loaded, and called for one episode, in which nobody samples."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import orjson

from rollout.engine import wait_for
from rollout.episodes.config import EpisodeConfig
from rollout.episodes.sampler import EPISODES, EpisodeSampler, worker_words
from rollout.episodes.vocabulary import Vocabulary
from rollout.processes.child_process import START_TIMEOUT_S, ChildStartError, with_remedy
from rollout.types import Completion, FinishReason, GenerateRequest, Generation, Prompt, SamplingParams
from rollout.user_code.pool import UserCodeError
from rollout.user_code.worker import Said, Worker

MAX_TURNS = 8
"""Turns that end by themselves; the next takes all tokens that are left."""


class Trial(NamedTuple):
    """What an episode has shown."""

    reason: str
    """The reason why the episode failed; "" if it did not."""
    num_turns: int
    """Turns that the function had got by then. Before the first, nothing that a model writes can be the cause."""


def load_problem(config: EpisodeConfig) -> str:
    """The reason why a rollout function cannot be loaded in its process; "" if it can."""
    inbox: queue.SimpleQueue[Said] = queue.SimpleQueue()
    try:
        worker = Worker(EPISODES, [config.function or "", *worker_words(config, "")], inbox)
    except ChildStartError as error:
        return str(error)
    try:
        line = inbox.get(timeout=START_TIMEOUT_S).line
    except queue.Empty:
        return f"it was not loaded within {START_TIMEOUT_S:g} s"
    finally:
        worker.kill()
    return f"its process {worker.death().text}" if line is None else with_remedy(orjson.loads(line).get("failed", ""))


def try_episode(config: EpisodeConfig, prompt: Prompt, sampling: SamplingParams, tokenizer_file: Path) -> Trial:
    """Call the function for `prompt` with an engine that answers every turn with the reference answer."""
    script = ScriptedSampler(Vocabulary(str(tokenizer_file)).encode(prompt.answer))
    request = GenerateRequest(
        prompt_id=prompt.prompt_id,
        sample_index=0,
        prompt_token_ids=prompt.token_ids,
        answer=prompt.answer,
        row=prompt.row,
        sampling=sampling,
    )
    one = replace(config, num_workers=1, outage_wait_s=0.0)
    with closing(EpisodeSampler(script, one, tokenizer_file=tokenizer_file)) as sampler:
        try:
            [generation] = wait_for(sampler.submit([request]), sampler.poll, others=[])
        except UserCodeError as error:
            return Trial(error.cause, 0)
        stats = sampler.take_stats()
    failed = generation.finish_reason is FinishReason.failed
    return Trial(stats.last_failure.partition(": ")[2] if failed else "", stats.turns)


class ScriptedSampler:
    """Answers every request with the same tokens, and one of the tokens that end a turn, each in its turn."""

    abort_timeout_s = 0.0

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)
        self._done: list[Completion] = []
        self._asked = 0

    def submit(self, requests: Sequence[GenerateRequest]) -> list[int]:
        """Answer at once."""
        tickets = list(range(self._asked, self._asked + len(requests)))
        for ticket, request in zip(tickets, requests, strict=True):
            limit, stops = request.sampling.max_new_tokens, request.sampling.stop_token_ids
            tokens = [*self._token_ids[: limit - 1], stops[-1 - ticket % len(stops)] if stops else 0]
            if ticket >= MAX_TURNS:
                tokens = (tokens * limit)[:limit]
            reason = FinishReason.stop if stops and ticket < MAX_TURNS else FinishReason.length
            generation = Generation(
                token_ids=tokens,
                logprobs=[-1.0] * len(tokens),
                token_versions=[0] * len(tokens),
                finish_reason=reason,
            )
            self._done.append(Completion(ticket, generation))
        self._asked += len(requests)
        return tickets

    def poll(self, timeout_s: float) -> list[Completion]:
        """The answers since the last poll."""
        done, self._done = self._done, []
        return done

    def abort(self, tickets: Sequence[int] | None) -> None:
        """Nothing is ever under way."""

    @property
    def unfinished(self) -> int:
        """Number of answers that `poll` has not returned yet."""
        return len(self._done)

    def sampling_s(self) -> float:
        """No time is spent."""
        return 0.0

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """The answers to `requests`."""
        self.submit(requests)
        return [each.generation for each in self.poll(0.0)]
