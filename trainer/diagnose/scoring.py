"""How log-probs of given tokens come about: every choice that an engine or a trainer can make, or get wrong, as data.

`Scoring()` is the definition: the model's own weights in float32, the whole response read at once. A possible cause of
a mismatch is a `Scoring` with one thing changed; `logprob_scorer.py` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum

from rollout.config import DType, Quantization


class Prompt(Enum):
    """What of the prompt is read."""

    whole = "whole"
    without_first = "without its first token"
    without_last = "without its last token"
    first_twice = "with its first token twice"
    with_bos = "with the token of the beginning before it"


class EditKind(Enum):
    """What is wrong with a tensor."""

    scaled = "scaled"
    """Multiplied by `factor`; 0 is a tensor that is missing."""
    exchanged = "exchanged"
    """Holds the numbers of the tensor `other`."""
    older = "older"
    """Holds the numbers of the weights `source`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEdit:
    """One tensor with other numbers than it should have."""

    name: str
    """As in the model."""
    kind: EditKind
    factor: float = 1.0
    other: str = ""
    source: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """The choices that decide the final hidden states."""

    weights: int = 0
    """Number of the weights: 0 is those that sampled, others are older."""
    share: float = 1.0
    """How far the weights lie on the way from those that sampled (0) to `weights` (1)."""
    edits: tuple[TensorEdit, ...] = ()
    rounded: DType = DType.float32
    """Type to which all weights are rounded before float32 arithmetic."""
    quantization: Quantization = Quantization.none
    """Of the projections, weights and inputs, as the engines of Parity do it."""
    arithmetic: DType = DType.float32
    """Type of activations and weights."""
    replays: bool = False
    """True if the layers of a mixture use the experts that the engine chose, not those that they choose themselves."""
    prompt: Prompt = Prompt.whole
    gap: int = 0
    """Positions left out between prompt and response."""
    restarts: bool = False
    """True if positions begin at 0 again with the response."""
    prefix: int | None = None
    """Number of the weights that read the prompt, if not those of the response: a stale prefix cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """All choices."""

    body: Body = Body()
    head: DType = DType.float32
    """Type of the head's product."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 for all."""
    min_p: float = 0.0
    shift: int = 0
    """The log-prob of a token is that of the token so many places before it."""

    def with_body(self, **changes: object) -> Scoring:
        """The same with other choices in `body`."""
        return replace(self, body=replace(self.body, **changes))  # type: ignore[arg-type]

    def computed_in(self, dtype: DType) -> Scoring:
        """The same computed in `dtype`, head included; 16-bit arithmetic has 16-bit weights."""
        rounded = self.body.rounded if dtype is DType.float32 else dtype
        return replace(self.with_body(arithmetic=dtype, rounded=rounded), head=dtype)

    def changed_as(self, before: Scoring, after: Scoring) -> Scoring:
        """The same with every choice that differs between `before` and `after`."""

        def differing(old: object, new: object) -> dict[str, object]:
            names = [each.name for each in fields(old)]  # type: ignore[arg-type]
            return {name: getattr(new, name) for name in names if getattr(old, name) != getattr(new, name)}

        own = {**differing(before, after), "body": replace(self.body, **differing(before.body, after.body))}  # type: ignore[arg-type]
        return replace(self, **own)  # type: ignore[arg-type]

    @property
    def exact(self) -> Scoring:
        """The same without rounding that depends on the order: in float32, and without a format."""
        return self.computed_in(DType.float32).with_body(quantization=Quantization.none)

    def with_edits(self, *edits: TensorEdit) -> Scoring:
        """The same with more wrong tensors; an edit of the same tensor is replaced."""
        names = {edit.name for edit in edits}
        kept = tuple(edit for edit in self.body.edits if edit.name not in names)
        return self.with_body(edits=kept + edits)
