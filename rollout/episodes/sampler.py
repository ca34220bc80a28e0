"""EpisodeSampler: requests -> responses of several turns, between the collector and the engines.

To the collector it is a sampler like the engines. Every turn is a request of its own to the engines, whose prompt is
everything before it; between turns the rollout function decides. The transcript is kept here: a rollout function
cannot change what was sampled.
"""

from __future__ import annotations

import itertools
import queue
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from rollout.engine import wait_for
from rollout.episodes.child import SEPARATOR
from rollout.episodes.config import EpisodeConfig
from rollout.episodes.worker import EpisodeWorker, Inbox
from rollout.types import Completion, FinishReason, GenerateRequest, Generation

if TYPE_CHECKING:
    from rollout.dispatch import Sampler

GIB = 1 << 30
START_TIMEOUT_S = 120.0
MAX_ATTEMPTS = 2
"""How often an episode is begun whose worker was lost through no fault that can be shown to be its own."""
TICK_S = 0.02
"""Both sides are waited for in turns of this length while both have something to do."""


class EpisodeFunctionError(RuntimeError):
    """The rollout function cannot be used at all; names it and what happened."""


@dataclass(kw_only=True, slots=True)
class _Running:
    """One episode."""

    ticket: int
    request: GenerateRequest
    worker: EpisodeWorker
    attempt: int = 1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    num_turns: int = 0
    quantized: bool = False
    """Whether the engine of the last turn holds quantised weights."""
    last: FinishReason = FinishReason.failed
    engine_ticket: int | None = None
    """While the engines sample a turn."""
    since: float = 0.0
    """When the rollout function was given its last turn; time.monotonic()."""

    @property
    def tokens_left(self) -> int:
        return self.request.sampling.max_new_tokens - len(self.token_ids)

    def add(self, generation: Generation) -> None:
        """A turn that was sampled."""
        self.token_ids += generation.token_ids
        self.token_versions += generation.token_versions
        self.sampled += [True] * len(generation.token_ids)
        known = self.logprobs is not None and generation.logprobs is not None
        self.logprobs = [*(self.logprobs or ()), *(generation.logprobs or ())] if known else None
        self.num_turns += 1
        self.last = generation.finish_reason
        self.quantized = generation.quantized

    def observe(self, token_ids: Sequence[int]) -> None:
        """What the model is shown: no log-prob, and the version of what came before."""
        shown = token_ids[: self.tokens_left]
        self.token_ids += shown
        self.token_versions += [self.token_versions[-1] if self.token_versions else 0] * len(shown)
        self.sampled += [False] * len(shown)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(shown)

    def generation(self, reason: FinishReason) -> Generation:
        """The transcript. What was observed before the first turn has the version of that turn."""
        first = self.sampled.index(True) if True in self.sampled else 0
        return Generation(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            token_versions=self.token_versions[first : first + 1] * first + self.token_versions[first:],
            finish_reason=reason,
            sampled=self.sampled,
            quantized=self.quantized,
        )


@dataclass(kw_only=True, slots=True)
class EpisodeStats:
    """What happened since the last look."""

    ended: int = 0
    turns: int = 0
    failed: int = 0
    restarted: int = 0
    last_failure: str = ""

    def metrics(self) -> dict[str, float | None]:
        """episode/turns_mean, failed, restarted."""
        mean = self.turns / self.ended if self.ended else None
        return {"episode/turns_mean": mean, "episode/failed": self.failed, "episode/restarted": self.restarted}


class EpisodeSampler:
    """Implements `rollout.dispatch.Sampler` over another one. Usable from one thread."""

    def __init__(self, sampler: Sampler, config: EpisodeConfig, *, tokenizer_file: Path) -> None:
        """`tokenizer_file` is the tokenizer.json of the model."""
        if config.function is None:
            raise ValueError("episode.function is null: responses of one turn need no EpisodeSampler")
        self._sampler = sampler
        self._config = config
        self._function = f"{config.function}{SEPARATOR}{tokenizer_file}"
        self._tickets = itertools.count()
        self._inbox: Inbox = queue.SimpleQueue()
        self._workers: list[EpisodeWorker] = []
        self._episodes: dict[int, _Running] = {}
        self._of_engine_ticket: dict[int, int] = {}
        self._done: list[Completion] = []
        self._stats = EpisodeStats()

    def submit(self, requests: Sequence[GenerateRequest]) -> list[int]:
        """Begin an episode for each request; their tickets."""
        tickets = []
        for request in requests:
            if request.resumed is not None:
                raise ValueError("an episode cannot be resumed: the rollout function does not remember its first part")
            ticket = next(self._tickets)
            self._episodes[ticket] = self._begun(_Running(ticket=ticket, request=request, worker=self._worker()))
            tickets.append(ticket)
        return tickets

    def poll(self, timeout_s: float) -> list[Completion]:
        """The episodes that have ended since the last poll; waits at most `timeout_s` for the first.

        Raises EpisodeFunctionError if the rollout function cannot be loaded, and what the engines raise.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = deadline - time.monotonic()
            self._hear_workers(remaining if not self._of_engine_ticket else 0.0)
            self._hear_engines(remaining)
            self._check_deadlines()
            if self._done or remaining <= 0 or not self._episodes:
                done, self._done = self._done, []
                return done

    def abort(self, tickets: Sequence[int] | None) -> None:
        """End the unfinished episodes among `tickets`, None for all; `poll` returns what they have so far."""
        chosen = list(self._episodes) if tickets is None else [each for each in tickets if each in self._episodes]
        for episode in (self._episodes[ticket] for ticket in chosen):
            self._let_go(episode)
            self._finish(episode, FinishReason.abort)

    @property
    def unfinished(self) -> int:
        """Tickets that `poll` has not returned yet."""
        return len(self._episodes) + len(self._done)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """One response per request, in their order; `poll` returns what else ends meanwhile."""
        others: list[Completion] = []
        try:
            return wait_for(self.submit(requests), self.poll, others=others)
        finally:
            self._done += others

    def sampling_s(self) -> float:
        """Seconds in which the engines have sampled since they started; mean over engines."""
        return self._sampler.sampling_s()

    def take_stats(self) -> EpisodeStats:
        """What happened since the last call."""
        taken, self._stats = self._stats, EpisodeStats()
        return taken

    def close(self) -> None:
        """End the workers; safe to call twice. They start again with the next episode."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _worker(self) -> EpisodeWorker:
        """The worker with the fewest episodes; all are started with the first episode."""
        while len(self._workers) < self._config.num_workers:
            self._workers.append(self._start())
        loads = {id(worker): 0 for worker in self._workers}
        for episode in self._episodes.values():
            loads[id(episode.worker)] = loads.get(id(episode.worker), 0) + 1
        return min(self._workers, key=lambda worker: loads[id(worker)])

    def _start(self) -> EpisodeWorker:
        memory_bytes = int(self._config.memory_gib * GIB)
        return EpisodeWorker(self._function, memory_bytes=memory_bytes, inbox=self._inbox)

    def _begun(self, episode: _Running) -> _Running:
        request = episode.request
        episode.worker.say(
            {
                "start": episode.ticket,
                "token_ids": request.prompt_token_ids,
                "answer": request.answer,
                "row": request.row,
                "max_new_tokens": request.sampling.max_new_tokens,
            }
        )
        episode.since = time.monotonic()
        return episode

    def _hear_workers(self, timeout_s: float) -> None:
        """Act on what rollout functions want; waits for the first message only if the engines have nothing to do."""
        wait_s = min(max(timeout_s, 0.0), self._config.timeout_s)
        try:
            said = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                if said.worker in self._workers:
                    self._heed(said.worker, said.message)
                said = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _heed(self, worker: EpisodeWorker, message: dict[str, Any] | None) -> None:
        if message is None:
            crashed = [each for each in self._episodes.values() if each.ticket == worker.running]
            self._replace(worker, f"its worker {worker.death()}", blamed=crashed if worker.ready else ())
        elif "ready" in message:
            worker.ready = True
        elif "running" in message:
            worker.running = message["running"]
        elif "failed" in message:
            self.close()
            raise EpisodeFunctionError(f"episode.function={self._config.function}: {message['failed']}")
        elif (episode := self._episodes.get(message["generate" if "generate" in message else "end"])) is not None:
            episode.observe(message["observed"])
            if "generate" in message:
                self._ask_engines(episode, message)
            else:
                self._end(episode, message["error"])

    def _ask_engines(self, episode: _Running, wish: dict[str, Any]) -> None:
        sampling = episode.request.sampling
        turn = replace(
            episode.request,
            prompt_token_ids=[*episode.request.prompt_token_ids, *episode.token_ids],
            sampling=replace(
                sampling,
                max_new_tokens=min(wish["max_new_tokens"], episode.tokens_left),
                stop_token_ids=(*sampling.stop_token_ids, *wish["stop_token_ids"]),
                seed=turn_seed(sampling.seed, episode.num_turns),
            ),
        )
        [episode.engine_ticket] = self._sampler.submit([turn])
        self._of_engine_ticket[episode.engine_ticket] = episode.ticket

    def _hear_engines(self, remaining: float) -> None:
        if not self._of_engine_ticket:
            return
        # Whatever a rollout function wants next should not wait behind the longest turn.
        between_turns = len(self._episodes) > len(self._of_engine_ticket)
        wait_s = min(remaining, TICK_S) if between_turns else remaining
        for ticket, generation in self._sampler.poll(max(0.0, wait_s)):
            number = self._of_engine_ticket.pop(ticket, None)
            if number is None:
                continue  # the episode was given up in the meantime
            episode = self._episodes[number]
            episode.engine_ticket = None
            episode.add(generation)
            if generation.finish_reason not in (FinishReason.stop, FinishReason.length):
                self._let_go(episode)
                self._finish(episode, generation.finish_reason)
                continue
            stopped = generation.finish_reason is FinishReason.stop
            episode.worker.say({"turn": number, "token_ids": generation.token_ids, "stopped": stopped})
            episode.since = time.monotonic()

    def _end(self, episode: _Running, error: str | None) -> None:
        if error is None and not episode.num_turns:
            error = "it ended without having sampled anything"
        if error is not None:
            self._stats.last_failure = f"prompt {episode.request.prompt_id}/{episode.request.sample_index}: {error}"
            self._finish(episode, FinishReason.failed)
        else:
            self._finish(episode, FinishReason.length if episode.tokens_left < 1 else episode.last)

    def _finish(self, episode: _Running, reason: FinishReason) -> None:
        del self._episodes[episode.ticket]
        self._stats.ended += 1
        self._stats.turns += episode.num_turns
        self._stats.failed += reason is FinishReason.failed
        self._done.append(Completion(episode.ticket, episode.generation(reason)))

    def _let_go(self, episode: _Running) -> None:
        """Nobody is to work on the episode any more."""
        if episode.engine_ticket is not None:
            self._sampler.abort([episode.engine_ticket])
            self._of_engine_ticket.pop(episode.engine_ticket, None)
            episode.engine_ticket = None
        episode.worker.say({"cancel": episode.ticket})

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            limit = self._config.timeout_s if worker.ready else START_TIMEOUT_S
            late = [
                each
                for each in self._episodes.values()
                if each.worker is worker and each.engine_ticket is None and now - each.since > limit
            ]
            if late:
                # Code that never gives way makes all others late.
                blamed = [each for each in late if each.ticket == worker.running] or late
                self._replace(worker, f"no answer within {limit:g} s after a turn", blamed=blamed)

    def _replace(self, worker: EpisodeWorker, what: str, *, blamed: Sequence[_Running]) -> None:
        """A worker is lost: the episodes that it hung in fail, the others of it begin anew in another one."""
        worker.kill()
        self._workers.remove(worker)
        for episode in [each for each in self._episodes.values() if each.worker is worker]:
            self._let_go(episode)
            if episode in blamed or episode.attempt >= MAX_ATTEMPTS:
                self._end(episode, what)
                continue
            self._stats.restarted += 1
            # Who is to blame is out of the way now; if nobody is known to be, it may be this one.
            attempt = episode.attempt + (not blamed)
            anew = _Running(ticket=episode.ticket, request=episode.request, worker=self._worker(), attempt=attempt)
            self._episodes[episode.ticket] = self._begun(anew)


def turn_seed(seed: int, turn: int) -> int:
    """The sampling seed of a turn: that of the request for the first one, then hashes of it, in [0, 2**31)."""
    if turn == 0:
        return seed
    return xxhash.xxh3_64_intdigest(struct.pack("<2q", seed, turn)) & 0x7FFFFFFF


@contextmanager
def with_episodes(sampler: Sampler, config: EpisodeConfig, *, model_path: Path) -> Iterator[Sampler]:
    """`sampler` as it is, or behind an EpisodeSampler if the config names a rollout function."""
    if config.function is None:
        yield sampler
        return
    tokenizer_file = model_path / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ValueError(f"episode.function={config.function} needs a fast tokenizer: {tokenizer_file} does not exist")
    with closing(EpisodeSampler(sampler, config, tokenizer_file=tokenizer_file)) as episodes:
        yield episodes


def episode_metrics(sampler: Sampler) -> dict[str, float | None]:
    """episode/* since the last call; nothing for responses of one turn."""
    return sampler.take_stats().metrics() if isinstance(sampler, EpisodeSampler) else {}
