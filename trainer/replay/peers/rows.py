"""What the readers share: problems of a file, its rows and numbers, whole sequences, and responses -> a bundle.

JSON Lines are read row by row: a file of a million tokens is never in memory as a whole. Some trainers write NaN and
Infinity, which are no JSON; Python's own reader takes them, and they read as numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from trainer.replay.bundle import Bundle, BundleError

SHOWN = 3
"""Places that are named for one kind of problem."""
HOW = "docs/bundle.md, Files of other trainers"
"""Where the ways out are written down."""


class Problems:
    """What is wrong with a file, gathered before it is refused."""

    def __init__(self, path: Path, *, kind: str) -> None:
        """`kind`: what the file is taken for, for the message."""
        self._path, self._kind = path, kind
        self._places: dict[str, list[str]] = {}

    def add(self, text: str, *, place: str = "") -> None:
        """Note a problem at `place`, such as "line 3"; equal ones are told once, with their places."""
        self._places.setdefault(text, []).extend([place] if place else [])

    def __bool__(self) -> bool:
        return bool(self._places)

    def refuse(self) -> None:
        """Raises BundleError with everything that was noted; nothing happens if there is nothing."""
        if self._places:
            found = "; ".join(_told(text, places) for text, places in self._places.items())
            raise BundleError(f"{self._path} is no {self._kind} that can be read: {found} ({HOW})")


def _told(text: str, places: Sequence[str]) -> str:
    if not places:
        return text
    more = len(places) - SHOWN
    return f"{', '.join(places[:SHOWN])}{f' and {more:,} more' if more > 0 else ''}: {text}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Response:
    """One response of a file. L: its tokens, from the first to the last that the model sampled."""

    rollout_logprobs: Tensor
    """[L] float32, nats; NaN where the file has none."""
    old_logprobs: Tensor
    """[L] float32, nats; NaN where the file has none."""
    mask: Tensor
    """[L] bool, the tokens that the model sampled and that count."""
    advantages: Tensor | None = None
    """[L] float32."""
    token_ids: Tensor | None = None
    """[L] int32."""
    reward: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where responses come from: the metadata of their bundle."""

    producer: str
    step: int | None = None
    more: dict[str, str] = field(default_factory=dict)

    def metadata(self) -> dict[str, str]:
        """The texts; `step` only if it is known."""
        step = {} if self.step is None else {"step": str(self.step)}
        return {"producer": self.producer} | step | self.more


def bundle_from(responses: Sequence[Response], source: Source, problems: Problems) -> Bundle:
    """The responses as a bundle. A tensor is left out unless every response has it.

    It has no `groups`: no file that is read here names the group of a response, and two groups may have one prompt.
    Raises BundleError with the problems noted before, or if no token counts.
    """
    if not problems and not any(bool(each.mask.any()) for each in responses):
        problems.add("no token in it is one that the model sampled: the mask is 0 everywhere")
    problems.refuse()
    rewards = [each.reward for each in responses if each.reward is not None]
    whole = len(responses)
    return Bundle(
        lengths=torch.tensor([len(each.mask) for each in responses], dtype=torch.int32),
        rollout_logprobs=torch.cat([each.rollout_logprobs for each in responses]),
        old_logprobs=torch.cat([each.old_logprobs for each in responses]),
        mask=torch.cat([each.mask for each in responses]).to(torch.uint8),
        advantages=_together([each.advantages for each in responses]),
        token_ids=_together([each.token_ids for each in responses]),
        rewards=torch.tensor(rewards, dtype=torch.float32) if len(rewards) == whole else None,
        metadata=source.metadata(),
    )


def _together(values: Sequence[Tensor | None]) -> Tensor | None:
    there = [each for each in values if each is not None]
    return torch.cat(there) if len(there) == len(values) else None


def floats(values: object) -> Tensor | None:
    """[L] float32 of a list of numbers, or of a tensor [L]; null reads as NaN. None if it is neither."""
    if isinstance(values, list) and None in values:
        values = [float("nan") if each is None else each for each in values]
    return _flat(values, torch.float32)


def integers(values: object) -> Tensor | None:
    """[L] int32 of a list of whole numbers, or of a tensor [L]. None if it is neither."""
    return _flat(values, torch.int32)


def _flat(values: object, dtype: torch.dtype) -> Tensor | None:
    if not isinstance(values, list | Tensor):
        return None
    try:
        found = values.detach().cpu().to(dtype) if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    except (TypeError, ValueError, RuntimeError):  # texts, lists of lists, numbers that do not fit
        return None
    return found if found.dim() == 1 else None


def number(value: object) -> float | None:
    """A number as a float; None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def sampled_part(mask: Tensor) -> slice:
    """[L] bool -> from the first to the last token where it is True; empty if there is none."""
    places = mask.nonzero().flatten()
    return slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a file."""

    place: str
    """Such as "line 3"."""
    values: dict[str, object]

    def floats(self, name: str, problems: Problems) -> Tensor | None:
        """[L] float32 of a key, or None; that it is there but no list of numbers is noted."""
        return self._tensor(name, problems, floats(self.values.get(name)))

    def integers(self, name: str, problems: Problems) -> Tensor | None:
        """[L] int32 of a key, or None; that it is there but no list of whole numbers is noted."""
        return self._tensor(name, problems, integers(self.values.get(name)))

    def _tensor(self, name: str, problems: Problems, found: Tensor | None) -> Tensor | None:
        if found is None and self.values.get(name) is not None:
            problems.add(f"{name} is no list of numbers", place=self.place)
        return found

    def lack(self, wanted: dict[str, str], problems: Problems) -> bool:
        """Whether one of the keys of `wanted` is missing; each is noted, with its text: what it means."""
        missing = [name for name in wanted if self.values.get(name) is None]
        for name in missing:
            problems.add(f"no {name}: {wanted[name]}", place=self.place)
        return bool(missing)


def rows(path: Path, problems: Problems) -> Iterator[Row]:
    """Yield the rows that are JSON objects; every other line that is not empty is noted."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"line {number:,}"
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                problems.add(f"is no JSON ({error})", place=place)
                continue
            if isinstance(values, dict):
                yield Row(place=place, values=values)
            else:
                problems.add("is no JSON object", place=place)


def first_keys(path: Path) -> set[str]:
    """The keys of the first row that is a JSON object; empty if there is none."""
    unused = Problems(path, kind="JSON Lines")
    return next((set(row.values) for row in rows(path, unused)), set())


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The keys under which NeMo-RL, or prime-rl, writes what every sequence needs, prompt included."""

    mask: str
    rollout_logprobs: str
    old_logprobs: str

    def missing(self, row: Row, problems: Problems) -> bool:
        """True if `row` lacks a required key; notes each missing key in `problems`, with what it means."""
        wanted = {
            self.mask: "which tokens the model sampled is not known",
            self.rollout_logprobs: "there are no log-probs of the engine",
            self.old_logprobs: "there are no log-probs of the trainer",
        }
        return row.lack(wanted, problems)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WholeSequence:
    """The lists of one row. S: tokens of the sequence, with prompt and padding."""

    sampled: Tensor
    """[S] bool, by the trainer's mask."""
    rollout_logprobs: Tensor
    """[S] float32, of the token at the same place."""
    old_logprobs: Tensor
    """[S] float32."""
    advantages: Tensor | None
    """[S] float32."""
    token_ids: Tensor | None
    """[S] int32."""

    def response(self, counts: Tensor, *, reward: float | None = None) -> Response:
        """The response in it; `counts` [S] bool: a sampled token may still be one that does not count."""
        part = sampled_part(self.sampled)
        return Response(
            rollout_logprobs=self.rollout_logprobs[part],
            old_logprobs=self.old_logprobs[part],
            mask=(self.sampled & counts)[part],
            advantages=None if self.advantages is None else self.advantages[part],
            token_ids=None if self.token_ids is None else self.token_ids[part],
            reward=reward,
        )


def sequence_of(row: Row, names: Names, problems: Problems) -> WholeSequence | None:
    """The lists of `row`; None if one is missing, or no list of numbers, or not as long as the others. All is noted."""
    if names.missing(row, problems):
        return None
    mask = row.floats(names.mask, problems)
    rollout = row.floats(names.rollout_logprobs, problems)
    old = row.floats(names.old_logprobs, problems)
    advantages, token_ids = row.floats("advantages", problems), row.integers("token_ids", problems)
    if mask is None or rollout is None or old is None:
        return None
    found = {
        names.mask: mask,
        names.rollout_logprobs: rollout,
        names.old_logprobs: old,
        "advantages": advantages,
        "token_ids": token_ids,
    }
    lengths = {name: len(each) for name, each in found.items() if each is not None}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {length:,}" for name, length in lengths.items())
        problems.add(f"the lists are not of one length: {told}", place=row.place)
        return None
    return WholeSequence(
        sampled=mask != 0, rollout_logprobs=rollout, old_logprobs=old, advantages=advantages, token_ids=token_ids
    )
