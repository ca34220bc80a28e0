"""EpisodeSampler: requests -> responses of several turns, between the collector and the engines.

The collector uses it as a sampler like the engines. Every turn is a separate request to the engines, whose prompt is
the response up to that turn; between turns the rollout function runs, in a process of its own. The sampler keeps the
transcript: a rollout function cannot change sampled tokens.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from rollout.engine import wait_for
from rollout.episodes.config import EpisodeConfig
from rollout.episodes.running import RunningEpisode, Wish, read_observed, read_wish
from rollout.types import Completion, FinishReason, GenerateRequest, Generation
from rollout.user_code.pool import Asked, CallPool, Ended, Event, Failure, Outcome, Repeated, Withdrawn
from rollout.user_code.worker import Kind

if TYPE_CHECKING:
    from rollout.collect.dispatch import Sampler

logger = logging.getLogger(__name__)

EPISODES = Kind(section="episode", module="rollout.episodes.child", read=read_observed, read_question=read_wish)


def worker_words(config: EpisodeConfig, tokenizer_file: Path | str) -> list[str]:
    """What a process that runs rollout functions is started with, beside the function."""
    return [str(tokenizer_file), orjson.dumps(config.arguments).decode()]


TICK_S = 0.02
"""Seconds of waiting per poll of the engines, while rollout functions may also do something."""


@dataclass(kw_only=True, slots=True)
class EpisodeStats:
    """Counts of episodes since the last `take_stats`."""

    ended: int = 0
    turns: int = 0
    failed: int = 0
    restarted: int = 0
    calls: Counter[Failure] = field(default_factory=Counter)
    """Failures of rollout functions, those of episodes that began anew included."""
    last_failure: str = ""

    def note(self, episode: RunningEpisode, failure: Failure | None, message: str) -> None:
        """Record that something went wrong; None if the function has only lost its process, or broken a rule."""
        self.calls.update([failure] if failure else [])
        self.last_failure = f"{episode.name}: {message}"

    def counts(self) -> dict[str, int]:
        """Those of the metrics episode/failed, restarted, timeouts, crashes and errors, by these names."""
        counts = {"failed": self.failed, "restarted": self.restarted}
        counts |= {failure.value: self.calls[failure] for failure in Failure}
        return {f"episode/{name}": count for name, count in counts.items()}

    def warn(self) -> None:
        """Log a warning if any episode failed."""
        if self.failed:
            logger.warning("%d of %d episodes failed; the last was %s", self.failed, self.ended, self.last_failure)


class EpisodeSampler:
    """Implements `rollout.collect.dispatch.Sampler` over another sampler. Usable from one thread."""

    def __init__(self, sampler: Sampler, config: EpisodeConfig, *, tokenizer_file: Path) -> None:
        """`tokenizer_file` is the path of the model's tokenizer.json."""
        self._sampler = sampler
        self._pool = CallPool(EPISODES, config.function or "", config, more=worker_words(config, tokenizer_file))
        self._tickets = itertools.count()
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
            ticket = next(self._tickets)
            tickets.append(ticket)
            self._episodes[ticket] = RunningEpisode(ticket=ticket, request=request)
            self._pool.submit(
                ticket,
                {
                    "token_ids": request.prompt_token_ids,
                    "answer": request.answer,
                    "row": request.row,
                    "max_new_tokens": request.sampling.max_new_tokens,
                },
            )
        return tickets

    def poll(self, timeout_s: float) -> list[Completion]:
        """The episodes that have ended since the last poll; waits at most `timeout_s` for the first.

        Raises UserCodeError if the rollout function cannot be loaded, and any error of the engines.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            remaining = deadline - time.monotonic()
            self._hear_functions(remaining if not self._of_engine_ticket else 0.0)
            self._hear_engines(remaining)
            if self._done or remaining <= 0 or not self._episodes:
                done, self._done = self._done, []
                return done

    def abort(self, tickets: Sequence[int] | None) -> None:
        """End the unfinished episodes among `tickets`, None for all; `poll` returns their tokens so far."""
        chosen = list(self._episodes) if tickets is None else [each for each in tickets if each in self._episodes]
        for episode in (self._episodes[ticket] for ticket in chosen):
            self._give_up(episode, FinishReason.abort)

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

    @property
    def files(self) -> dict[str, str]:
        """See `CallPool.files`."""
        return self._pool.files

    def take_stats(self) -> EpisodeStats:
        """Statistics since the last call; resets them."""
        stats, self._stats = self._stats, EpisodeStats()
        return stats

    def take_outage_s(self) -> float:
        """See `CallPool.take_outage_s`."""
        return self._pool.take_outage_s()

    def close(self) -> None:
        """End the workers; safe to call twice."""
        self._pool.close()

    def _hear_functions(self, timeout_s: float) -> None:
        """Act on what rollout functions do; waits for the first event only if the engines have no request."""
        for event in self._pool.poll(timeout_s):
            episode = self._episodes.get(event.key)
            if episode is not None:  # else it was given up in the meantime
                self._heed(episode, event)
        if self._turns:  # one call for all of them: each is a round trip to the engines
            numbers, turns = list(self._turns), list(self._turns.values())
            self._turns = {}
            for number, engine_ticket in zip(numbers, self._sampler.submit(turns), strict=True):
                self._episodes[number].engine_ticket = engine_ticket
                self._of_engine_ticket[engine_ticket] = number

    def _heed(self, episode: RunningEpisode, event: Event) -> None:
        match event:
            case Asked(value=Wish() as wish):
                if not wish.goes_on:
                    episode.settle(wish.observed)
                if episode.tokens_left < 1:
                    self._fail(episode, "it asked for a turn, and no tokens are left")
                    return
                episode.asked = event
                self._turns[episode.ticket] = episode.next_turn(wish)
            case Withdrawn():
                self._withdraw(episode)
            case Repeated(_, failure, message):
                stats = self._stats_of(episode)
                stats.restarted += 1
                stats.note(episode, failure, message)
                self._withdraw(episode)
                self._episodes[episode.ticket] = RunningEpisode(ticket=episode.ticket, request=episode.request)
            case Ended(_, outcome):
                self._end(episode, outcome)

    def _hear_engines(self, remaining: float) -> None:
        if not self._of_engine_ticket:
            return
        # The next event of a rollout function must not wait for the longest turn.
        between_turns = len(self._episodes) > len(self._of_engine_ticket)
        wait_s = min(remaining, TICK_S) if between_turns else remaining
        for ticket, generation in self._sampler.poll(max(0.0, wait_s)):
            number = self._of_engine_ticket.pop(ticket, None)
            if number is None:
                continue  # the turn was given up in the meantime
            episode = self._episodes[number]
            episode.engine_ticket = None
            episode.unseen.append(generation)
            if generation.finish_reason not in (FinishReason.stop, FinishReason.length):
                if generation.finish_reason is FinishReason.failed:
                    self._stats_of(episode).last_failure = f"{episode.name}: no engine could serve a turn"
                self._give_up(episode, generation.finish_reason)
                continue
            stopped = generation.finish_reason is FinishReason.stop
            is_end = stopped and generation.token_ids[-1] in episode.request.sampling.stop_token_ids
            if episode.asked is not None:
                answer = {"token_ids": generation.token_ids, "stopped": stopped, "is_end": is_end}
                self._pool.answer(episode.asked, answer)

    def _end(self, episode: RunningEpisode, outcome: Outcome) -> None:
        """The rollout function is over."""
        if outcome.failure is not None:
            self._stats_of(episode).note(episode, outcome.failure, outcome.message)
            episode.settle([])
            self._finish(episode, FinishReason.failed)
        else:
            episode.settle(outcome.value)
            if not episode.num_turns:
                self._fail(episode, "it ended without having sampled anything")
            else:
                self._finish(episode, FinishReason.length if episode.tokens_left < 1 else episode.last)

    def _fail(self, episode: RunningEpisode, what: str) -> None:
        self._stats_of(episode).note(episode, None, what)
        self._give_up(episode, FinishReason.failed)

    def _give_up(self, episode: RunningEpisode, reason: FinishReason) -> None:
        """End an episode before its function does, with the tokens so far."""
        self._pool.cancel(episode.ticket)
        episode.settle([])
        self._finish(episode, reason)

    def _finish(self, episode: RunningEpisode, reason: FinishReason) -> None:
        self._withdraw(episode)
        del self._episodes[episode.ticket]
        stats = self._stats_of(episode)
        stats.ended += 1
        stats.turns += episode.num_turns
        stats.failed += reason is FinishReason.failed
        self._done.append(Completion(episode.ticket, episode.generation(reason)))

    def _withdraw(self, episode: RunningEpisode) -> None:
        """Withdraw the episode's turn from the engines; the response has none of its tokens."""
        self._turns.pop(episode.ticket, None)
        episode.unseen = []
        if episode.engine_ticket is not None:
            self._sampler.abort([episode.engine_ticket])
            self._of_engine_ticket.pop(episode.engine_ticket, None)
            episode.engine_ticket = None

    def _stats_of(self, episode: RunningEpisode) -> EpisodeStats:
        return self._alone.get(episode.ticket, self._stats)


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
        try:
            yield episodes
        finally:
            episodes.take_stats().warn()  # the failures that have ended a run in the middle of a step


def episode_files(sampler: Sampler) -> dict[str, str]:
    """`CallPool.files` of the rollout function; empty for responses of one turn."""
    return sampler.files if isinstance(sampler, EpisodeSampler) else {}


def take_episode_counts(sampler: Sampler) -> dict[str, int]:
    """`EpisodeStats.counts` since the last call; warns of failed episodes. Empty for responses of one turn."""
    if not isinstance(sampler, EpisodeSampler):
        return {}
    stats = sampler.take_stats()
    stats.warn()
    return stats.counts()


def episode_outage(sampler: Sampler) -> dict[str, float | None]:
    """episode/outage_s since the last call, evaluations included; empty for responses of one turn."""
    return {"episode/outage_s": sampler.take_outage_s()} if isinstance(sampler, EpisodeSampler) else {}
