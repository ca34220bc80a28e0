"""The contract of a rollout function, `episode.function=path.py:name`:

    async def rollout(episode: Episode) -> None:
        while True:
            said = await episode.generate(stop=["</call>"])
            call = find_call(said.text)
            if call is None:
                return
            episode.observe(run(call))

`generate` samples the next turn, `observe` appends tokens that the model is shown. The sampled tokens go unchanged from
the engine to the trainer: a rollout function can read but not change them. Observed tokens are off the response mask:
no log-prob, no weight, no loss, no entropy. Rollout functions run in the processes of `rollout/episodes/child.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

RolloutFn = Callable[["Episode"], Awaitable[None]]


class EpisodeError(RuntimeError):
    """A rollout function made an invalid request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Tokens sampled by one `generate`."""

    token_ids: list[int]
    text: str
    """Sampled text, decoded without special tokens."""
    stopped: bool
    """True if the model ended its turn; False if the tokens ran out."""
    stop_token_id: int | None
    """Token that ended the turn; None if the tokens ran out."""


@dataclass(kw_only=True, slots=True)
class Episode:
    """One response while it is being built."""

    prompt: str
    """The prompt as text."""
    answer: str
    """The reference answer, for environments that report the distance to it."""
    row: dict[str, Any]
    """The other columns of the prompt's row, as plain JSON values."""
    tokens_left: int
    """Number of tokens, sampled or observed, that the response may still have; at first sampling.max_new_tokens."""
    encode: Callable[[str], list[int]]
    """Text -> token ids, without special tokens."""
    decode: Callable[[Sequence[int]], str]
    """Token ids -> text, without special tokens."""
    ask: Callable[[Episode, dict[str, Any]], Awaitable[dict[str, Any]]]
    """Sends a request to the parent and returns its reply; for `generate` only."""
    token_id: Callable[[str], int | None]
    """Token -> its id; None if the vocabulary does not have the token."""
    observed: list[int] = field(default_factory=list)
    """Observed tokens that were not sent to the parent yet."""
    ended: bool = False
    """True if no token can follow: the tokens ran out."""

    async def generate(self, *, stop: Sequence[str | int] = (), max_new_tokens: int | None = None) -> Turn:
        """Sample until the model ends its response, or emits a token of `stop` (names or ids), or runs out of tokens.

        The stop token is part of the turn. Raises EpisodeError if no token can follow, or for an unknown token.
        """
        if self.ended or self.tokens_left < 1:
            raise EpisodeError("there are no tokens left: look at episode.tokens_left or Turn.stopped")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise EpisodeError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
        ids = [self._stop_id(token) for token in stop]
        limit = self.tokens_left if max_new_tokens is None else min(max_new_tokens, self.tokens_left)
        wish = {"observed": self.observed, "stop_token_ids": ids, "max_new_tokens": limit}
        self.observed = []
        reply = await self.ask(self, wish)
        tokens: list[int] = reply["token_ids"]
        self.tokens_left -= len(tokens)
        self.ended = self.tokens_left < 1
        stopped = bool(reply["stopped"])
        return Turn(
            token_ids=tokens,
            text=self.decode(tokens),
            stopped=stopped,
            stop_token_id=tokens[-1] if stopped and tokens else None,
        )

    def observe(self, shown: str | Sequence[int]) -> int:
        """Append text or token ids that the model did not write; returns the number of tokens appended.

        Tokens beyond `tokens_left` are cut off, and the response then ends as truncated.
        """
        ids = self.encode(shown) if isinstance(shown, str) else [int(token) for token in shown]
        if any(not 0 <= token < 2**31 for token in ids):
            raise EpisodeError("observe needs token ids >= 0")
        kept = ids[: self.tokens_left]
        self.observed += kept
        self.tokens_left -= len(kept)
        self.ended = self.tokens_left < 1
        return len(kept)

    def _stop_id(self, token: str | int) -> int:
        if isinstance(token, int):
            return token
        found = self.token_id(token)
        if found is None:
            raise EpisodeError(
                f"stop={token!r} is no token of the vocabulary: tokens are sampled one by one, so a turn can only end "
                "with a single one; name another, or its id"
            )
        return found


def check_rollout_fn(found: object, *, name: str) -> RolloutFn:
    """Return `found` if it is a rollout function; raises ValueError with the required signature if not."""
    if not inspect.iscoroutinefunction(found) or len(inspect.signature(found).parameters) != 1:
        raise ValueError(f"episode.function={name} must be `async def` with one parameter, the episode")
    return found
