"""What the numbers of a bundle say by themselves: log-probs that slipped, and the age of the weights."""

from __future__ import annotations

import math

from torch import Tensor

from trainer.diagnose.alignment import aligned
from trainer.diagnose.case import misfit
from trainer.diagnose.diagnosis import Diagnosis, Part
from trainer.diagnose.evidence import Evidence, k3_between
from trainer.diagnose.rungs import MOST_SLIPS
from trainer.diagnose.shares import Share
from trainer.text.plain import counted

LEAST_GAIN = 0.8
"""Share of the misfit that a slip takes away: less can be chance where nothing else is known."""
LEAST_OF_AGE = 0.1
"""Share of K3 from which the age of the weights is named."""
NEEDS_MODEL = (
    "without a model only the numbers are judged. For all other causes give the weights that sampled, model=<directory>"
)
NEEDS_PROMPTS = "the bundle has no token_ids, prompt_ids and prompt_lengths: without them no model can read its tokens"


def diagnose_numbers(evidence: Evidence) -> Diagnosis:
    """Try the causes that need no model."""
    whole = k3_between(evidence.engine, evidence.trainer, evidence.mask)
    part = _of_slips(evidence, whole) or _of_age(evidence, whole)
    return Diagnosis(
        evidence=evidence,
        k3=whole,
        parts=() if part is None else (part,),
        unexplained=Share(
            k3=(rest := whole - (0.0 if part is None else part.k3)), share=rest / whole if whole else math.nan
        ),
        notes=(NEEDS_MODEL if evidence.can_be_read else NEEDS_PROMPTS,),
    )


def _of_slips(evidence: Evidence, whole: float) -> Part | None:
    """The part of log-probs that stand beside the wrong tokens."""
    moved, slips = aligned(evidence.engine, evidence.trainer, evidence.lengths, evidence.mask)
    before = _misfit(evidence.engine, evidence.trainer, evidence.mask)
    if not slips or _misfit(moved, evidence.trainer, evidence.mask) > (1 - LEAST_GAIN) * before:
        return None
    is_shift = slips <= len(evidence.lengths)
    if not is_shift and slips > MOST_SLIPS * len(moved):
        return None
    return Part(
        side="engine",
        name="shift" if is_shift else "other tokens",
        what=f"has log-probs that fit if they slip by a token at {slips} places of {len(evidence.lengths)} responses",
        remedy="the slice that cuts the log-probs out, or text that is encoded again between engine and trainer",
        k3=(part := whole - k3_between(moved, evidence.trainer, evidence.mask)),
        share=part / whole,
        is_declared=False,
        is_fault=True,
    )


def _misfit(engine: Tensor, trainer: Tensor, mask: Tensor) -> float:
    return float(misfit((engine - trainer)[mask]).nanmean().nan_to_num(math.inf))


def _of_age(evidence: Evidence, whole: float) -> Part | None:
    """The part of K3 that tokens of older weights have above the others; None where there are none."""
    if evidence.lags is None:
        return None
    old, new = evidence.mask & (evidence.lags > 0), evidence.mask & (evidence.lags == 0)
    if not bool(old.any()) or not bool(new.any()):  # nothing to compare with
        return None
    share, oldest = float(old.sum() / evidence.mask.sum()), int(evidence.lags.max())
    part = whole - k3_between(evidence.engine, evidence.trainer, new)
    if part <= LEAST_OF_AGE * whole:
        return None
    return Part(
        side="engine",
        name="stale weights",
        what=f"sampled {share:.0%} of the tokens with weights up to {counted(oldest, 'optimizer step')} old",
        remedy="the schedule: less asynchrony, or a correction that takes it (docs/corrections.md)",
        k3=part,
        share=part / whole,
        is_declared=True,
        is_fault=False,
    )
