"""Rules between correction and loss, and the loss that results from the two."""

from __future__ import annotations

from collections.abc import Iterator

from algorithms.config.correction import CorrectionConfig
from algorithms.config.loss import Aggregation, LossConfig, PPOClipConfig, ReinforceConfig
from algorithms.config.rules import Problem
from algorithms.config.spec import Anchor, Level, RejectedDenominator, SelfNormalize


def resolved_loss(correction: CorrectionConfig, loss: LossConfig) -> LossConfig:
    """The loss to compute: REINFORCE for a correction without a ratio (bypass with loss=reinforce), else `loss`."""
    if correction.spec().anchor is not Anchor.none or isinstance(loss, ReinforceConfig):
        return loss
    return ReinforceConfig(
        aggregation=loss.aggregation, fixed_length_tokens=loss.fixed_length_tokens, entropy_coef=loss.entropy_coef
    )


def combination_problems(correction: CorrectionConfig, loss: LossConfig) -> Iterator[Problem]:
    """Yield a Problem for every contradiction between correction and loss."""
    spec = correction.spec()
    if spec.anchor is Anchor.none and not isinstance(loss, PPOClipConfig | ReinforceConfig):
        yield Problem(
            key="loss",
            rule=f"must be reinforce or left alone with correction={correction.mode} as it is set: it has no ratio",
            value=loss.surrogate,
            remedy="Use loss=reinforce, or a correction whose ratio has an anchor.",
        )
    if spec.anchor is Anchor.rollout and isinstance(loss, ReinforceConfig):
        yield Problem(
            key="loss",
            rule=f"must have a ratio with correction={correction.mode}, which corrects inside the ratio pi_theta/mu",
            value=loss.surrogate,
            remedy="Use loss=ppo_clip, or correction=bypass correction.loss=reinforce, or correction=tis.",
        )
    if spec.self_normalize is not SelfNormalize.none and loss.entropy_coef > 0:
        yield Problem(
            key="loss.entropy_coef",
            rule="must be 0 with self-normalised weights, whose normaliser scales the whole gradient",
            value=loss.entropy_coef,
            remedy="Set it to 0, or correction.self_normalize=none.",
        )


def combination_notes(correction: CorrectionConfig, loss: LossConfig) -> Iterator[str]:
    """Yield one sentence for every combination that is allowed and probably not intended."""
    yield from correction.notes()
    if resolved_loss(correction, loss) is not loss:
        yield f"the keys of loss={loss.surrogate} beside aggregation and entropy_coef have no effect: there is no ratio"
    spec = correction.spec()
    if spec.rejected_denominator is RejectedDenominator.drop and loss.aggregation is Aggregation.token_sum:
        yield "rejected_denominator=drop changes nothing with loss.aggregation=token_sum, which divides by nothing"
    weight = spec.weight
    if weight is not None and weight.level is Level.sequence and loss.surrogate == "gspo":
        yield (
            "the weight is a product over the response, the ratio of gspo a geometric mean: long responses lose "
            "their gradient; correction.level=geometric matches it"
        )
