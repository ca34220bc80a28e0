"""samples.jsonl -> samples for the page: tables of single steps, and tokens coloured by the engines' difference.

Delta is log p_train - log p_rollout of the sampled token, nats. All values come from a model or a dataset and are shown
as text.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

from trainer.report.data import Row, RunData, at, cut, is_number, show

T = TypeVar("T")
WORST_SAMPLES = 8
"""Number of samples with coloured tokens on the page of one run, over all steps."""
SHORT_TOKENS = 64
"""Number of tokens above which a response is folded in tables."""
MAX_TOKENS = 4096
"""Tokens of a sample on the page, each of at most MAX_TOKEN_CHARS; the tracker writes fewer."""
MAX_TOKEN_CHARS = 200
PICKED = 6
"""Samples of each kind that are picked from all steps, and held-out prompts of each kind."""
_PICKS = (
    ("Highest reward", "reward", True),
    ("Lowest reward", "reward", False),
    ("Largest mismatch", "k3", True),
    ("Longest", "num_response_tokens", True),
)
"""(title, number of a sample, True if the largest come first)."""
LEAST_FRAME = 24
"""Number of equal characters at one end of all prompts from which they are shown once instead of in every prompt."""
DECADES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Values of |Delta| from which a token has the next stronger colour."""


class Token(NamedTuple):
    """One token of a response."""

    text: str
    kind: str
    """CSS class of the colour: "m3" less, "p3" more probable in the trainer; "" below the first decade; "off" for a
    token that the model did not sample."""
    said: str
    """Delta and both probabilities as text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColouredSample:
    """A sample with its tokens."""

    row: Row
    tokens: list[Token]
    num_before: int
    """Number of response tokens before the kept ones."""
    num_after: int

    @property
    def is_whole(self) -> bool:
        """True if the kept tokens are all tokens of the response."""
        return not self.num_before and not self.num_after

    @property
    def is_short(self) -> bool:
        """True if the whole response fits into a table."""
        return self.is_whole and len(self.tokens) <= SHORT_TOKENS


class Picked(NamedTuple, Generic[T]):
    """Some samples, or prompts, under a title."""

    title: str
    of: int
    """Number of those of the kind."""
    rows: list[T]


class PromptFrame(NamedTuple):
    """What every prompt of a run begins and ends with: a system prompt, a template, an instruction."""

    start: str
    end: str

    def inside(self, prompt: str) -> str:
        """The prompt with an ellipsis in place of the frame."""
        first, last = len(self.start), len(prompt) - len(self.end)
        return f"{'…' if self.start else ''}{prompt[first:last]}{'…' if self.end else ''}"


def prompt_frame(run: RunData) -> PromptFrame:
    """The frame of the run's prompts; an end that is short, or not shared by all, is ""."""
    prompts = list({str(row["prompt"]) for row in run.samples})
    if len(prompts) < 2:
        return PromptFrame("", "")
    start = _shared_start(prompts)
    end = _shared_start([prompt[len(start) :][::-1] for prompt in prompts])[::-1]
    return PromptFrame(*(part if len(part) >= LEAST_FRAME else "" for part in (start, end)))


def _shared_start(texts: Sequence[str]) -> str:
    """The characters that all texts begin with, up to the last space: 12 and 13 share no part of a number."""
    pairs = zip(min(texts), max(texts), strict=False)  # what these two share, all others in between share too
    shared = "".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return shared[: max(shared.rfind(" "), shared.rfind("\n")) + 1]


def sample_tables(run: RunData) -> list[Picked[Row]]:
    """The samples of the last and the first step that has samples, the worst K3 first; and some of all steps, picked by
    chance, reward, K3 and length. Of equal ones chance picks."""
    rows = sorted(run.samples, key=_by_chance)
    steps = sorted({row["step"] for row in rows})
    tables = []
    for step in sorted({*steps[:1], *steps[-1:]}, reverse=True):
        chosen = sorted((row for row in rows if row["step"] == step), key=_worst_first)
        tables.append(Picked(f"Step {step}", len(chosen), chosen))
    if len(steps) < 3:
        return tables
    picks = [("At random", [row for row in rows if not at(row, "by_k3")])]
    for title, key, reverse in _PICKS:
        known = [row for row in rows if is_number(row, key)]
        picks.append((title, sorted(known, key=itemgetter(key), reverse=reverse)))
    return tables + [Picked(f"{title}, all steps", len(found), found[:PICKED]) for title, found in picks if found]


def heldout_tables(run: RunData) -> list[Picked[list[Row]]]:
    """Held-out prompts by what became of them from the first evaluation to the last one, some of each kind.

    A prompt is its greedy response at the first evaluation and at the last one, which may be the same.
    """
    answers: dict[tuple[str, str], dict[int, Row]] = {}
    for step, rows in sorted(run.evaluations.items()):
        for row in rows:  # an evaluation that was made again comes later
            answers.setdefault((str(row["set"]), str(row["prompt_id"])), {})[step] = row
    kinds: dict[tuple[bool, ...], list[list[Row]]] = {}
    for by_step in answers.values():
        if len(by_step) == len(run.evaluations):
            kind = tuple(at(row, "correct") is True for row in by_step.values())
            kinds.setdefault(kind, []).append(list(by_step.values()))
    return [
        Picked(", then ".join("right" if each else "wrong" for each in kind), len(found), found[:PICKED])
        for kind, found in sorted(kinds.items(), key=lambda item: (-len(set(item[0])), item[0]))  # changes first
    ]


def told_apart(row: Row) -> list[tuple[bool, str]]:
    """(True if the model sampled it, text) of each segment of a response; empty if nothing else wrote in it."""
    found = at(row, "segments")
    listed = found if isinstance(found, list) else []
    return [(at(each, "sampled") is not False, cut(str(at(each, "text")))) for each in listed if at(each, "text")]


def parts(row: Row) -> list[str]:
    """What the reward function returned beside the score, as "name value"."""
    found = at(row, "reward_parts")
    named = found if isinstance(found, dict) else {}
    return [f"{key} {show(named[key], 'number')}" for key in named if is_number(named, key)]


def worst_samples(run: RunData, *, count: int = WORST_SAMPLES) -> list[ColouredSample]:
    """The samples with the largest K3 over all steps, among the samples with kept tokens."""
    samples = map(coloured, sorted(run.samples, key=_worst_first))
    return list(itertools.islice((sample for sample in samples if sample is not None), count))


def coloured(row: Row) -> ColouredSample | None:
    """The tokens of a sample; None if the tokens were not kept, or do not have the tracker's form."""
    kept = at(row, "tokens")
    if kept is None:
        return None
    try:
        num_before, num_tokens = int(kept["first"]), int(kept["num_tokens"])
        triples = zip(kept["texts"], kept["rollout_logprobs"], kept["deltas"], strict=True)
        shown = itertools.islice(triples, MAX_TOKENS)
        tokens = [_token(str(text)[:MAX_TOKEN_CHARS], logprob, delta) for text, logprob, delta in shown]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    num_after = max(0, num_tokens - num_before - len(tokens))
    return ColouredSample(row=row, tokens=tokens, num_before=num_before, num_after=num_after)


def legend() -> Iterator[tuple[str, str]]:
    """(CSS class, meaning) from far less to far more probable in the trainer."""
    for index in reversed(range(len(DECADES))):
        yield f"m{index + 1}", f"≤ -{_number(DECADES[index])}"
    yield "", "0"
    for index, edge in enumerate(DECADES):
        yield f"p{index + 1}", f"≥ {_number(edge)}"


def _token(text: str, logprob: Any, delta: Any) -> Token:
    if delta is None or logprob is None:
        return Token(text, "off", "not sampled by the model, or not scored")
    value, sampled = float(delta), float(logprob)
    level = sum(abs(value) >= edge for edge in DECADES)
    kind = f"{'p' if value > 0 else 'm'}{level}" if level else ""
    before, after = (math.exp(min(0.0, one)) for one in (sampled, sampled + value))
    return Token(text, kind, f"Δ {value:+.2g}: p {before:.3g} in the rollout, {after:.3g} in training")


def _number(edge: float) -> str:
    return f"{edge:.0e}".replace("e-0", "e-") if edge < 1e-3 else f"{edge:g}"


def _by_chance(row: Row) -> int:
    """Sort key: the same order every time, which says nothing about the sample."""
    return zlib.crc32(repr([at(row, key) for key in ("step", "prompt_id", "sample_index")]).encode())


def _worst_first(row: Row) -> float:
    """Sort key: the largest K3 first; K3 is never negative, so samples without K3 come last."""
    return -float(row["k3"]) if is_number(row, "k3") else 1.0
