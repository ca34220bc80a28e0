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
import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from rollout.episodes.vocabulary import Vocabulary
from rollout.user_code.serving import Ask

NO_TOKENS = (bytes, bytearray, memoryview, Mapping, Set)
"""Types whose members are numbers or texts, but not the tokens of a text in their order."""
RolloutFn = Callable[["Episode"], Awaitable[None]]


class EpisodeError(RuntimeError):
    """A rollout function made an invalid request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Tokens sampled by one `generate`."""

    token_ids: list[int]
    text: str
    """Sampled text, decoded without special tokens."""
    raw_text: str
    """The same with them: where marks of your own, such as <tool_call>, are special tokens, they stand here only."""
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
    vocabulary: Vocabulary
    ask: Ask
    """Sends the request for a turn to the parent and returns its reply; for `generate` only."""
    observed: list[int] = field(default_factory=list)
    """Observed tokens that were not sent to the parent yet."""
    ended: bool = False
    """True if no token can follow: the tokens ran out."""
    is_sampling: bool = False
    """True while a turn is being sampled."""

    def encode(self, text: str) -> list[int]:
        """Text -> token ids with which it reads so after other text, without special tokens around it.

        Raises EpisodeError for a text that the tokenizer cannot write.
        """
        try:
            return self.vocabulary.encode(text)
        except Exception as error:  # the library has no class for it
            raise EpisodeError(f"the tokenizer has no tokens for {text[:100]!r}: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids -> text, without special tokens."""
        return self.vocabulary.decode(token_ids)

    async def generate(self, *, stop: Sequence[str | int] = (), max_new_tokens: int | None = None) -> Turn:
        """Sample until the model ends its response, or emits something of `stop`, or runs out of tokens.

        `stop` has token ids, names of special tokens, and texts of any number of tokens. The token that ends the turn
        is part of it, as a whole if a text ends within the token. If the caller is cancelled, by a deadline of its own,
        the turn is withdrawn: no token of it stays in the response. Raises EpisodeError if no token can follow, for an
        empty text, or while another turn is being sampled.
        """
        if self.is_sampling:
            raise EpisodeError("a turn is being sampled already: await generate() before you ask for the next turn")
        if self.ended or self.tokens_left < 1:
            raise EpisodeError("there are no tokens left: look at episode.tokens_left or Turn.stopped")
        ids, texts = self._stops(stop)
        limit = self.tokens_left
        if max_new_tokens is not None:
            limit = min(limit, whole_number(max_new_tokens, "max_new_tokens"))
        if limit < 1:
            raise EpisodeError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
        self.is_sampling = True
        try:
            tokens, stopped = await self._sample(ids, texts, limit)
        finally:
            self.is_sampling = False
        self.tokens_left -= len(tokens)
        self.ended = self.tokens_left < 1
        return Turn(
            token_ids=tokens,
            text=self.decode(tokens),
            raw_text=self.vocabulary.decode(tokens, raw=True),
            stopped=stopped,
            stop_token_id=tokens[-1] if stopped and tokens else None,
        )

    async def _sample(self, ids: set[int], texts: Sequence[str], limit: int) -> tuple[list[int], bool]:
        """The tokens of a turn, and whether it ended before `limit` tokens.

        An engine ends a turn at single tokens. So it stops wherever a text can have ended, and goes on if none has:
        that changes no distribution, and costs a request.
        """
        last = sorted(ids.union(*map(self.vocabulary.enders, texts)))
        window = max((len(text.encode()) for text in texts), default=0) + 1
        tokens: list[int] = []
        while True:
            wish = {"observed": self.unsent(), "stop_token_ids": last, "max_new_tokens": limit - len(tokens)}
            reply = await self.ask(wish | {"goes_on": bool(tokens)})
            tokens += reply["token_ids"]
            if not reply["stopped"] or reply["is_end"] or not tokens or tokens[-1] in ids:
                return tokens, bool(reply["stopped"])
            tail = self.vocabulary.decode_after(tokens[-window:])
            if any(text in tail for text in texts):
                return tokens, True
            if len(tokens) >= limit:
                return tokens, False

    def unsent(self) -> list[int]:
        """Take the observed tokens that were not sent to the parent yet."""
        unsent, self.observed = self.observed, []
        return unsent

    def observe(self, shown: str | Sequence[int]) -> int:
        """Append text or token ids that the model did not write; returns the number of tokens appended.

        Tokens beyond `tokens_left` are cut off, and the response then ends as truncated. Raises EpisodeError for what
        is neither, as the bytes that a program has printed, and for ids that the tokenizer does not have.
        """
        if isinstance(shown, NO_TOKENS):
            raise EpisodeError(f"observe needs text or a list of token ids, got {type(shown).__name__}")
        ids = self.encode(shown) if isinstance(shown, str) else [self._token(each, "observe") for each in shown]
        kept = ids[: self.tokens_left]
        self.observed += kept
        self.tokens_left -= len(kept)
        self.ended = self.tokens_left < 1
        return len(kept)

    def _stops(self, stop: Sequence[str | int]) -> tuple[set[int], list[str]]:
        """(token ids, texts) at which a turn ends."""
        if isinstance(stop, str):
            raise EpisodeError(f"stop must be a list, got the text {stop!r}")
        names = {text: self.vocabulary.special_token(text) for text in stop if isinstance(text, str)}
        if "" in names:
            raise EpisodeError("stop has an empty text, which ends nowhere")
        ids = {self._token(each, "stop") for each in stop if not isinstance(each, str)}
        ids |= {token for token in names.values() if token is not None}
        texts = [text for text, token in names.items() if token is None]
        if held := [text for text in texts if self.vocabulary.has_special(text)]:
            raise EpisodeError(f"stop has {held[0]!r}: a special token ends a turn by its name alone")
        return ids, texts

    def _token(self, value: object, what: str) -> int:
        """`value` as an id of the tokenizer."""
        token = whole_number(value, f"a token id of {what}")
        if not 0 <= token < self.vocabulary.size:
            raise EpisodeError(f"a token id of {what} must lie in [0, {self.vocabulary.size}), got {token}")
        return token


def whole_number(value: object, what: str) -> int:
    """An integer of Python, numpy or torch as it is; raises EpisodeError for anything else, also for a bool."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise EpisodeError(f"{what} must be an integer, got {value!r:.100}") from error


def check_rollout_fn(found: object, *, name: str) -> RolloutFn:
    """Return `found` if it is a rollout function; raises ValueError with the required signature if not."""
    if inspect.iscoroutinefunction(found):
        parameters = inspect.signature(found).parameters.values()
        if len([each for each in parameters if each.default is each.empty]) == 1:
            return found
    rule = "`async def` with one parameter, the episode; episode.arguments gives others their values"
    raise ValueError(f"episode.function={name} must be {rule}")
