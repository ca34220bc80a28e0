"""The contract of a rollout function, `episode.function=path.py:name`:

    async def rollout(episode: Episode) -> None:
        while True:
            said = await episode.generate(stop=["</call>"])
            call = find_call(said.text)
            if call is None:
                return
            episode.observe(run(call))

`generate` samples what comes next, `observe` appends what the model is shown. The sampled tokens go from the engine to
the trainer as they are: a rollout function reads them and cannot change them. Observed tokens are off the response
mask: no log-prob, no weight, no loss, no entropy. Runs in the processes of `rollout/episodes/child.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

RolloutFn = Callable[["Episode"], Awaitable[None]]


class EpisodeError(RuntimeError):
    """A rollout function asked for what cannot be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What one `generate` sampled."""

    token_ids: list[int]
    text: str
    """Decoded without special tokens."""
    stopped: bool
    """Whether the model ended its turn; False where it ran out of tokens."""
    stop_token_id: int | None
    """The token with which it ended its turn."""


@dataclass(kw_only=True, slots=True)
class Episode:
    """One response in the making."""

    prompt: str
    """The prompt as text."""
    answer: str
    """The reference answer, for environments that tell how near the model is."""
    row: dict[str, Any]
    """The other columns of the prompt's row, as plain JSON values."""
    tokens_left: int
    """Sampled and observed tokens that the response may still have: sampling.max_new_tokens at its beginning."""
    encode: Callable[[str], list[int]]
    """Text -> token ids, without special tokens."""
    decode: Callable[[Sequence[int]], str]
    """Token ids -> text, without special tokens."""
    ask: Callable[[Episode, dict[str, Any]], Awaitable[dict[str, Any]]]
    """Sends what is wanted to the parent and returns its reply; for `generate` only."""
    token_id: Callable[[str], int | None]
    """Id of a token, None if the vocabulary has none of this name."""
    observed: list[int] = field(default_factory=list)
    """Observed tokens that the parent has not been sent yet."""
    ended: bool = False
    """Whether nothing can follow: the model ran out of tokens."""

    async def generate(self, *, stop: Sequence[str | int] = (), max_new_tokens: int | None = None) -> Turn:
        """Sample until the model ends its response, or emits a token of `stop` (names or ids), or runs out of tokens.

        The stop token is part of the turn. Raises EpisodeError where nothing can follow, or for an unknown token.
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
        """Append text or token ids that the model did not write; returns how many tokens fitted in.

        What does not fit into `tokens_left` is cut off, and the response then ends as one that ran out of tokens.
        """
        ids = self.encode(shown) if isinstance(shown, str) else list(shown)
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
    """`found` as a rollout function; raises ValueError saying what it should be."""
    if not inspect.iscoroutinefunction(found) or len(inspect.signature(found).parameters) != 1:
        raise ValueError(f"episode.function={name} must be `async def` with one parameter, the episode")
    return found
