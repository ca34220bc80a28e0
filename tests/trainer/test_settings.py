"""Every key of the loss, of the correction and of the reference reaches the gradient of an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import make_config, make_samples
from test_packing import pack_samples

from algorithms.config import (
    Aggregation,
    Anchor,
    Bound,
    BypassConfig,
    BypassLoss,
    Compared,
    CorrectionConfig,
    KLEstimator,
    Level,
    LossConfig,
    MISConfig,
    PPOClipConfig,
    PPOISConfig,
    RecomputeConfig,
    ReferenceKLConfig,
    RejectConfig,
    RejectedDenominator,
    SelfNormalize,
    TISConfig,
    VanillaISConfig,
)
from algorithms.config.correction import CORRECTIONS, CustomConfig, MISBound
from algorithms.config.loss import LOSSES
from algorithms.correction import correct
from trainer.batch.train_batch import TokenScores
from trainer.policy.step import compared_logprobs, correction_counts, step_factor, step_loss

LOSS_VALUES: dict[str, Any] = {
    "aggregation": Aggregation.seq_mean_token_sum,
    "fixed_length_tokens": 4096,
    "entropy_coef": 0.1,
    "clip_low": 0.01,
    "clip_high": 0.01,
    "dual_clip": 1.1,
    "low": 0.9,
    "high": 1.1,
    "threshold": 0.01,
}
"""Another value than the default of each key of a loss."""
CORRECTION_BASES: dict[str, CorrectionConfig] = {
    "recompute": RecomputeConfig(),
    "ppo_is": PPOISConfig(),
    "vanilla_is": VanillaISConfig(),
    "tis": TISConfig(),
    "mis": MISConfig(),
    "bypass": BypassConfig(loss=BypassLoss.reinforce, reject=RejectConfig(token_ratio=[0.5, 2.0])),
    "custom": CustomConfig(anchor=Anchor.none, level=Level.token, bound=Bound.mask, low=0.5, high=2.0),
}
"""Settings in which every key of a mode has an effect."""
CORRECTION_VALUES: dict[str, Any] = {
    "level": Level.sequence,
    "cap": 1.1,
    "self_normalize": SelfNormalize.mean_one,
    "low": 0.9,
    "high": 1.1,
    "reject": RejectConfig(token_ratio=[0.9, 1.1]),
    "rejected_denominator": RejectedDenominator.drop,
    "loss": BypassLoss.ppo_clip,
    "anchor": Anchor.old,
    "compared": Compared.current,
}
REJECT_VALUES: dict[str, Any] = {
    "token_ratio": [0.9, 1.1],
    "sequence_ratio": [0.9, 1.1],
    "geometric_ratio": [0.9, 1.1],
    "token_k3": 0.01,
    "mean_k3": 0.01,
    "max_k3": 0.01,
    "veto": 0.8,
    "prob_diff": [-0.01, 0.01],
    "mult_err": 1.1,
    "dppo_tv": 0.01,
    "dppo_kl": 0.001,
    "opsm": 0.01,
}


def step_gradient(
    loss: LossConfig, correction: CorrectionConfig | None = None, reference: ReferenceKLConfig | None = None
) -> torch.Tensor:
    """The gradient of one optimizer step with respect to log-probs and entropy [2, T]; policies far apart and near."""
    config = replace(
        make_config(Path("model"), loss=loss, correction=correction), reference=reference or ReferenceKLConfig()
    )
    [mini] = pack_samples([make_samples()], num_ranks=1, max_tokens=1000, policy_version=0).ranks[0]
    [micro] = mini.micro_batches
    mask, generator = micro.response_mask, torch.Generator().manual_seed(0)
    # From sequence to sequence the policies are further apart, up to one nat.
    sizes = torch.logspace(-3.5, 0.0, micro.num_tokens)

    def moved(logprobs: torch.Tensor) -> torch.Tensor:
        noise = sizes * torch.randn(len(mask), generator=generator)
        return torch.where(mask, (logprobs + noise).clamp(max=-0.01), 0.0)

    micro.rollout_logprobs = torch.where(mask, micro.rollout_logprobs - 1.0, 0.0)
    old = moved(micro.rollout_logprobs)
    logprobs, micro.ref_logprobs = moved(old).requires_grad_(), moved(old)
    micro.old_logprobs = old if config.correction.needs_old_logprobs else None  # as in a later optimizer step
    micro.advantages = torch.where(mask, torch.randn(len(mask), generator=generator), 0.0)
    scores = TokenScores(logprobs=logprobs, entropy=mask.float().requires_grad_(), floor_delta=None)
    applied = correct(config.correction.spec(), micro.tokens(compared_logprobs(micro, scores)))
    output = step_loss(config, micro, scores, applied, mini=mini)
    inputs = [logprobs, scores.entropy]
    gradients = torch.autograd.grad(output.loss, inputs, allow_unused=True, materialize_grads=True)
    return torch.stack(gradients) * step_factor(config, correction_counts(config, micro, applied), mini).gradient


def loss_pairs() -> Iterator[tuple[str, LossConfig, LossConfig]]:
    for kind in LOSSES.values():
        for spec in fields(kind):
            base = kind()
            if spec.name == "fixed_length_tokens":
                base = kind(aggregation=Aggregation.fixed_length, fixed_length_tokens=2048)
            yield f"{kind.surrogate}.{spec.name}", base, replace(base, **{spec.name: LOSS_VALUES[spec.name]})


def correction_pairs() -> Iterator[tuple[str, CorrectionConfig, CorrectionConfig]]:
    for mode in CORRECTIONS:
        base = CORRECTION_BASES[mode]
        bound = {"bound": MISBound.truncate if mode == "mis" else Bound.truncate}
        for spec in fields(base):
            yield f"{mode}.{spec.name}", base, replace(base, **{spec.name: (CORRECTION_VALUES | bound)[spec.name]})
    for spec in [spec for spec in fields(RejectConfig) if spec.name != "custom"]:
        one = RejectConfig(**{spec.name: REJECT_VALUES[spec.name]})
        yield f"reject.{spec.name}", CustomConfig(), CustomConfig(reject=one)


@pytest.mark.parametrize(("base", "changed"), [pytest.param(*pair, id=name) for name, *pair in loss_pairs()])
def test_every_key_of_a_loss_changes_the_gradient(base: LossConfig, changed: LossConfig) -> None:
    assert not torch.equal(step_gradient(base), step_gradient(changed))


@pytest.mark.parametrize(("base", "changed"), [pytest.param(*pair, id=name) for name, *pair in correction_pairs()])
def test_every_key_of_a_correction_changes_the_gradient(base: CorrectionConfig, changed: CorrectionConfig) -> None:
    loss = PPOClipConfig()
    assert not torch.equal(step_gradient(loss, base), step_gradient(loss, changed))


@pytest.mark.parametrize("change", [{"coef": 2.0}, {"estimator": KLEstimator.k3}])
def test_every_key_of_the_kl_in_the_loss_changes_the_gradient(change: dict[str, Any]) -> None:
    base = ReferenceKLConfig(coef=1.0)
    found = [step_gradient(PPOClipConfig(), reference=each) for each in (base, replace(base, **change))]
    assert not torch.equal(*found)


def test_the_kl_in_the_loss_has_the_weight_of_its_token_and_a_rejected_token_has_none() -> None:
    def of_kl(correction: CorrectionConfig) -> torch.Tensor:
        """The part of the KL in the gradient with respect to log-probs [T]."""
        reference = ReferenceKLConfig(coef=1.0)
        whole, without = (step_gradient(PPOClipConfig(), correction, each) for each in (reference, None))
        return (whole - without)[0]

    plain, masked = of_kl(RecomputeConfig()), of_kl(MISConfig(low=0.9, high=1.1, reject=RejectConfig()))
    weights = (masked / plain)[plain.abs() > 1e-5]
    kept = weights[weights != 0]
    assert 0 < len(kept) < len(weights)
    assert ((kept > 0.89) & (kept < 1.11)).all() and (kept - 1).abs().max() > 0.02
    unweighted = of_kl(CustomConfig(reject=RejectConfig(token_ratio=[0.9, 1.1])))
    assert torch.equal(unweighted, torch.where(masked == 0, 0.0, plain))
