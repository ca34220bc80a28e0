"""EpisodeSampler: requests -> responses of several turns, between the collector and the engines.

The collector uses it as a sampler like the engines. Every turn is a separate request to the engines, whose prompt is
the response up to that turn; between turns the rollout function runs. The sampler keeps the transcript: a rollout
function cannot change sampled tokens.
"""

from __future__ import annotations

import itertools
import logging
import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.engine import wait_for
from rollout.episodes.child import SEPARATOR
from rollout.episodes.config import EPISODE_MEMORY_BYTES, EpisodeConfig
from rollout.episodes.running import EpisodeWorker, Inbox, RunningEpisode
from rollout.processes.child_process import START_TIMEOUT_S, ChildStartError
from rollout.types import Completion, FinishReason, GenerateRequest, Generation

if TYPE_CHECKING:
    from rollout.collect.dispatch import Sampler

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
"""Number of starts of an episode whose worker was lost without a fault that is known to be the episode's."""
TICK_S = 0.02
"""Seconds of waiting per poll of the engines, while rollout functions may also send messages."""


class EpisodeFunctionError(RuntimeError):
    """The rollout function cannot be used at all; the message names the function and the cause."""


@dataclass(kw_only=True, slots=True)
class EpisodeStats:
    """Counts of episodes since the last `take_stats`."""

    ended: int = 0
    turns: int = 0
    failed: int = 0
    restarted: int = 0
    last_failure: str = ""

    def metrics(self) -> dict[str, float | None]:
        """The metrics episode/turns_mean, failed and restarted."""
        mean = self.turns / self.ended if self.ended else None
        return {"episode/turns_mean": mean, "episode/failed": self.failed, "episode/restarted": self.restarted}

    def warn(self) -> None:
        """Log a warning if any episode failed."""
        if self.failed:
            logger.warning("%d of %d episodes failed; the last was %s", self.failed, self.ended, self.last_failure)


class EpisodeSampler:
    """Implements `rollout.collect.dispatch.Sampler` over another sampler. Usable from one thread."""

    def __init__(self, sampler: Sampler, config: EpisodeConfig, *, tokenizer_file: Path) -> None:
        """`tokenizer_file` is the path of the model's tokenizer.json."""
        self._sampler = sampler
        self._config = config
        self._function = f"{config.function}{SEPARATOR}{tokenizer_file}"
        self._tickets = itertools.count()
        self._inbox: Inbox = queue.SimpleQueue()
        self._workers: list[EpisodeWorker] = []
        self._was_loaded = False
        """True once a worker has loaded the function; from then on a failure to load it is no fault of the function."""
        self._episodes: dict[int, RunningEpisode] = {}
        self._turns: dict[int, GenerateRequest] = {}
        """Episode -> request for its next turn, until the request is submitted."""
        self._of_engine_ticket: dict[int, int] = {}
        self._done: list[Completion] = []
        self._stats = EpisodeStats()
        self._alone: dict[int, EpisodeStats] = {}
        """Ticket -> statistics of the `generate` call that waits for the episode."""

    def submit(self, requests: Sequence[GenerateRequest]) -> list[int]:
        """Begin an episode for each request; returns their tickets."""
        tickets = []
        for request in requests:
            if request.resumed is not None:
                raise ValueError("an episode cannot be resumed: the rollout function does not remember its first part")
            tickets.append(next(self._tickets))
            self._begin(tickets[-1], request)
        return tickets

    def poll(self, timeout_s: float) -> list[Completion]:
        """The episodes that have ended since the last poll; waits at most `timeout_s` for the first.

        Raises EpisodeFunctionError if the rollout function cannot be loaded, and any error of the engines.
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
        """End the unfinished episodes among `tickets`, None for all; `poll` returns their tokens so far."""
        chosen = list(self._episodes) if tickets is None else [each for each in tickets if each in self._episodes]
        for episode in (self._episodes[ticket] for ticket in chosen):
            self._let_go(episode)
            self._finish(episode, FinishReason.abort)

    @property
    def unfinished(self) -> int:
        """Number of tickets that `poll` has not returned yet."""
        return len(self._episodes) + len(self._done)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """One response per request, in the order of the requests; `poll` returns other episodes that end meanwhile.

        As an evaluation is no part of a step, `take_stats` does not count these episodes; failed episodes are logged.
        """
        others: list[Completion] = []
        tickets = self.submit(requests)
        stats = EpisodeStats()
        self._alone.update(dict.fromkeys(tickets, stats))
        try:
            return wait_for(tickets, self.poll, others=others)
        finally:
            self._done += others
            for ticket in tickets:
                self._alone.pop(ticket, None)
            stats.warn()

    @property
    def abort_timeout_s(self) -> float:
        """Seconds within which `poll` returns every aborted request; an abort waits for no engine."""
        return self._sampler.abort_timeout_s

    def sampling_s(self) -> float:
        """Seconds that the engines have sampled since their start; mean over engines."""
        return self._sampler.sampling_s()

    def take_stats(self) -> EpisodeStats:
        """Statistics since the last call; resets them."""
        stats, self._stats = self._stats, EpisodeStats()
        return stats

    def close(self) -> None:
        """End the workers; safe to call twice. The workers start again with the next episode."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _begin(self, ticket: int, request: GenerateRequest, *, attempt: int = 1) -> None:
        """Start an episode in one of the workers, round robin; the first episode starts all workers."""
        while len(self._workers) < self._config.num_workers:
            try:
                worker = EpisodeWorker(self._function, memory_bytes=EPISODE_MEMORY_BYTES, inbox=self._inbox)
            except ChildStartError as error:
                raise EpisodeFunctionError(f"episode.function={self._config.function}: {error}") from error
            self._workers.append(worker)
        worker = self._workers[ticket % len(self._workers)]
        episode = RunningEpisode(ticket=ticket, request=request, worker=worker, attempt=attempt, since=time.monotonic())
        self._episodes[ticket] = episode
        try:
            worker.tell(
                {
                    "start": ticket,
                    "token_ids": request.prompt_token_ids,
                    "answer": request.answer,
                    "row": request.row,
                    "max_new_tokens": request.sampling.max_new_tokens,
                }
            )
        except TypeError as error:  # JSON cannot hold the row, such as one nested hundreds deep
            self._end(episode, f"the prompt's row cannot be sent to the function: {error}")

    def _hear_workers(self, timeout_s: float) -> None:
        """Act on messages of rollout functions; waits for the first message only if the engines have no request."""
        with suppress(queue.Empty):
            said = self._inbox.get(timeout=min(max(timeout_s, 0.0), self._config.timeout_s))
            while True:
                if said.worker in self._workers:
                    self._heed(said.worker, said.message)
                said = self._inbox.get_nowait()
        if self._turns:  # one call for all of them: each is a round trip to the engines
            numbers, turns = list(self._turns), list(self._turns.values())
            self._turns = {}
            for number, engine_ticket in zip(numbers, self._sampler.submit(turns), strict=True):
                self._episodes[number].engine_ticket = engine_ticket
                self._of_engine_ticket[engine_ticket] = number

    def _heed(self, worker: EpisodeWorker, message: dict[str, Any] | None) -> None:
        if message is None:
            death = worker.death()
            ran = [each for each in self._episodes.values() if each.ticket == worker.running]
            is_proven = worker.ready and not death.from_outside
            self._replace(worker, f"its worker {death.text}", blamed=ran if is_proven else ())
        elif "ready" in message:
            worker.ready = self._was_loaded = True
        elif "running" in message:
            worker.running = message["running"]
        elif "failed" in message:
            if not self._was_loaded:
                self.close()
                raise EpisodeFunctionError(f"episode.function={self._config.function}: {message['failed']}")
            self._replace(worker, f"a worker could not load the function: {message['failed']}", blamed=())
        else:
            episode = self._episodes.get(message["generate"] if "generate" in message else message["end"])
            if episode is None or episode.worker is not worker:
                return  # the episode was given up in the meantime
            if episode.engine_ticket is not None or episode.ticket in self._turns:
                self._let_go(episode)
                self._end(episode, message.get("error") or "it did not wait for the turn that it had asked for")
                return
            episode.observe(message["observed"])
            if "generate" in message and episode.tokens_left < 1:
                self._let_go(episode)
                self._end(episode, "it asked for a turn, and no tokens are left")
            elif "generate" in message:
                self._turns[episode.ticket] = episode.next_turn(message)
            else:
                self._end(episode, message["error"])

    def _hear_engines(self, remaining: float) -> None:
        if not self._of_engine_ticket:
            return
        # The next message of a rollout function must not wait for the longest turn.
        between_turns = len(self._episodes) > len(self._of_engine_ticket)
        wait_s = min(remaining, TICK_S) if between_turns else remaining
        for ticket, generation in self._sampler.poll(max(0.0, wait_s)):
            number = self._of_engine_ticket.pop(ticket, None)
            if number is None:
                continue  # the episode was given up in the meantime
            episode = self._episodes[number]
            episode.engine_ticket = None
            episode.add(generation)
            if generation.finish_reason is FinishReason.failed:
                self._stats_of(episode).last_failure = f"{episode.name}: no engine could serve a turn"
            if generation.finish_reason not in (FinishReason.stop, FinishReason.length):
                self._let_go(episode)
                self._finish(episode, generation.finish_reason)
                continue
            stopped = generation.finish_reason is FinishReason.stop
            episode.worker.tell({"turn": number, "token_ids": generation.token_ids, "stopped": stopped})
            episode.since = time.monotonic()

    def _end(self, episode: RunningEpisode, error: str | None) -> None:
        if error is None and not episode.num_turns:
            error = "it ended without having sampled anything"
        if error is not None:
            self._stats_of(episode).last_failure = f"{episode.name}: {error}"
            self._finish(episode, FinishReason.failed)
        else:
            self._finish(episode, FinishReason.length if episode.tokens_left < 1 else episode.last)

    def _finish(self, episode: RunningEpisode, reason: FinishReason) -> None:
        del self._episodes[episode.ticket]
        stats = self._stats_of(episode)
        stats.ended += 1
        stats.turns += episode.num_turns
        stats.failed += reason is FinishReason.failed
        self._done.append(Completion(episode.ticket, episode.generation(reason)))

    def _let_go(self, episode: RunningEpisode) -> None:
        """Withdraw the episode from its worker and from the engines."""
        self._turns.pop(episode.ticket, None)
        if episode.engine_ticket is not None:
            self._sampler.abort([episode.engine_ticket])
            self._of_engine_ticket.pop(episode.engine_ticket, None)
            episode.engine_ticket = None
        episode.worker.tell({"cancel": episode.ticket})

    def _stats_of(self, episode: RunningEpisode) -> EpisodeStats:
        return self._alone.get(episode.ticket, self._stats)

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
                # Code that does not yield delays all other episodes of its worker.
                blamed = [each for each in late if each.ticket == worker.running] or late
                self._replace(worker, f"no answer within {limit:g} s after a turn", blamed=blamed)

    def _replace(self, worker: EpisodeWorker, what: str, *, blamed: Sequence[RunningEpisode]) -> None:
        """Replace a lost worker: its `blamed` episodes fail, its other episodes start again in another worker."""
        worker.kill()
        self._workers.remove(worker)
        for episode in [each for each in self._episodes.values() if each.worker is worker]:
            self._let_go(episode)
            if episode in blamed or episode.attempt >= MAX_ATTEMPTS:
                self._end(episode, what)
                continue
            self._stats_of(episode).restarted += 1
            # With a blamed episode the cause is gone; without one this episode may be the cause, so the attempt counts.
            attempt = episode.attempt + (not blamed)
            self._begin(episode.ticket, episode.request, attempt=attempt)


@contextmanager
def with_episodes(sampler: Sampler, config: EpisodeConfig, *, model_path: Path) -> Iterator[Sampler]:
    """Yield `sampler` itself, or an EpisodeSampler over it if the config names a rollout function."""
    if config.function is None:
        yield sampler
        return
    tokenizer_file = model_path / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ValueError(f"episode.function={config.function} needs a fast tokenizer: {tokenizer_file} does not exist")
    with closing(EpisodeSampler(sampler, config, tokenizer_file=tokenizer_file)) as episodes:
        yield episodes


def episode_metrics(sampler: Sampler) -> dict[str, float | None]:
    """Metrics episode/* since the last call, with a warning if any episode failed; empty for responses of one turn."""
    if not isinstance(sampler, EpisodeSampler):
        return {}
    stats = sampler.take_stats()
    stats.warn()
    return stats.metrics()
