"""What the readers share: problems of a file, numbers of its rows, and responses -> a bundle."""

from __future__ import annotations

from collections.abc import Sequence
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
