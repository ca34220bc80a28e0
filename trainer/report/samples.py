"""samples.jsonl -> samples for the page: tables of single steps, and tokens coloured by what the engines disagree on.

Delta is log p_train - log p_rollout of the token that was sampled, nats. Everything here came from a model or a
dataset and is shown as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainer.report.data import Row, RunData, at, is_number

WORST_SAMPLES: Final = 8
"""Samples with coloured tokens that the page of one run shows, over all steps."""
SHORT_TOKENS: Final = 64
"""A longer response stands in tables as folded text."""
DECADES: Final = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""|Delta| from which a token takes the next stronger colour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One token of a response."""

    text: str
    kind: str
    """Class that colours it: "m3" less, "p3" more probable in the trainer; "" below the first decade; "off" where the
    model did not sample it."""
    said: str
    """Delta and both probabilities in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColouredSample:
    """A sample with its tokens."""

    row: Row
    tokens: list[Token]
    num_before: int
    """Tokens of the response before those that were kept."""
    num_after: int

    @property
    def is_whole(self) -> bool:
        """Whether these are all tokens of the response."""
        return not self.num_before and not self.num_after

    @property
    def is_short(self) -> bool:
        """Whether the whole response fits into a table."""
        return self.is_whole and len(self.tokens) <= SHORT_TOKENS


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTable:
    """The samples of one step, the worst K3 first."""

    step: int
    rows: list[Row]


def sample_tables(run: RunData) -> list[SampleTable]:
    """The samples of the first and of the last step that has any."""
    by_step: dict[int, list[Row]] = {}
    for row in run.samples:
        if is_number(row, "step"):
            by_step.setdefault(row["step"], []).append(row)
    steps = sorted({min(by_step), max(by_step)}) if by_step else []
    return [SampleTable(step=step, rows=sorted(by_step[step], key=_worst_first)) for step in steps]


def worst_samples(run: RunData, *, count: int = WORST_SAMPLES) -> list[ColouredSample]:
    """The samples with the largest K3 of all steps, of those whose tokens were kept."""
    found = (coloured(row) for row in sorted(run.samples, key=_worst_first))
    return [sample for sample, _ in zip((one for one in found if one is not None), range(count), strict=False)]


def coloured(row: Row) -> ColouredSample | None:
    """The tokens of a sample; None where they were not kept, or are not as the tracker writes them."""
    kept = at(row, "tokens")
    if not isinstance(kept, Mapping):
        return None
    try:
        texts, logprobs, deltas = kept["texts"], kept["rollout_logprobs"], kept["deltas"]
        num_before, num_tokens = int(kept["first"]), int(kept["num_tokens"])
        tokens = [_token(str(text), *pair) for text, *pair in zip(texts, logprobs, deltas, strict=True)]
    except (KeyError, TypeError, ValueError):
        return None
    num_after = max(0, num_tokens - num_before - len(tokens))
    return ColouredSample(row=row, tokens=tokens, num_before=num_before, num_after=num_after)


def legend() -> Iterator[tuple[str, str]]:
    """(class, what it means) from far less to far more probable in the trainer."""
    for index in reversed(range(len(DECADES))):
        yield f"m{index + 1}", f"≤ -{_number(DECADES[index])}"
    yield "", "0"
    for index, edge in enumerate(DECADES):
        yield f"p{index + 1}", f"≥ {_number(edge)}"


def _token(text: str, logprob: Any, delta: Any) -> Token:
    if delta is None or logprob is None:
        return Token(text=text, kind="off", said="not sampled by the model, or not scored")
    value, sampled = float(delta), float(logprob)
    level = sum(abs(value) >= edge for edge in DECADES)
    kind = f"{'p' if value > 0 else 'm'}{level}" if level else ""
    before, after = (math.exp(min(0.0, one)) for one in (sampled, sampled + value))
    return Token(text=text, kind=kind, said=f"Δ {value:+.2g}: p {before:.3g} in the rollout, {after:.3g} in training")


def _number(edge: float) -> str:
    return f"{edge:.0e}".replace("e-0", "e-") if edge < 1e-3 else f"{edge:g}"


def _worst_first(row: Row) -> float:
    """Sort key: the largest K3 first; K3 is never negative, so samples without one come last."""
    return -float(row["k3"]) if is_number(row, "k3") else 1.0
