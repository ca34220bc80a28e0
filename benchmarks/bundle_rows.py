"""What the parts of `bundle_peers.py` share: rows of its table, code blocks of docs/bundle.md, Parity's reading."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from algorithms.config import TISConfig
from algorithms.correction import correct
from algorithms.tokens import Tokens
from trainer.replay.bundle import Bundle
from trainer.replay.peers.recognise import read_any
from trainer.replay.results import replay_bundle

PAGE = Path(__file__).resolve().parents[1] / "docs" / "bundle.md"
AGREES = 1e-6
"""Largest relative difference that a row may have."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A number of a peer, and the same one read out of its file."""

    peer: str
    name: str
    """Of the number, at the peer."""
    metric: str = ""
    """Of the number, at Parity; empty where values of tokens are compared."""
    theirs: float | None = None
    ours: float | None = None
    largest: float | None = None
    """Largest difference of the values of tokens, where these are compared."""

    @property
    def difference(self) -> float:
        """Relative to the peer's number, for a number; of values of tokens the largest."""
        if self.largest is not None:
            return self.largest
        assert self.theirs is not None and self.ours is not None
        return abs(self.theirs - self.ours) / (abs(self.theirs) or 1.0)

    @property
    def holds(self) -> bool:
        return self.difference <= AGREES

    def markdown(self) -> str:
        numbers = ("", "") if self.theirs is None else (f"{self.theirs:.9g}", f"{self.ours:.9g}")
        metric = f"`{self.metric}`" if self.metric else ""
        return f"| {self.peer} | {self.name} | {metric} | {' | '.join(numbers)} | {self.difference:.0e} |"


TITLES = "| trainer | its number | Parity's | theirs | read | difference |\n| --- | --- | --- | --: | --: | --: |"


def block(words: str) -> str:
    """The code block of docs/bundle.md that has `words`."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [found] = [text for text in blocks if words in text]
    return found


def documented(words: str) -> dict[str, Any]:
    """The names that the code block with `words` defines."""
    names: dict[str, Any] = {}
    exec(block(words), names)  # noqa: S102 - our own page
    del names["__builtins__"]
    return names


def step_metrics(path: Path, mode: str, *, step: int | None = None) -> dict[str, float]:
    """Metrics of the step in `path`: those of the raw mismatch, and those of `mode` with its defaults."""
    replay = replay_bundle(read_any(path, step=step), [mode])
    both = replay.metrics | replay.scores[0].metrics
    return {name: value for name, value in both.items() if value is not None}


def tis_weights(bundle: Bundle, *, cap: float) -> Tensor:
    """`min(rho, cap)` of the sampled tokens of a bundle, in its order."""
    assert bundle.mask is not None
    ends = bundle.lengths.long().cumsum(0)
    tokens = Tokens(
        trainer_logprobs=bundle.old_logprobs,
        rollout_logprobs=bundle.rollout_logprobs,
        response_mask=bundle.mask.bool(),
        cu_seqlens=torch.cat([ends.new_zeros(1), ends]).int(),
    )
    correction = correct(TISConfig(cap=cap).spec(), tokens)
    return torch.where(correction.keep, correction.weight, 0.0)[bundle.mask.bool()]
