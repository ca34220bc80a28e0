"""Rows on TRL's GRPO: losses, importance sampling against the engine, advantages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from peer_batch import (
    AGREES,
    Batch,
    Outcome,
    Row,
    agreement,
    applied,
    corrected,
    outcome,
    parity_outcome,
    relative_difference,
    shown,
    verdicts_agree,
)
from peer_trl_trainer import HORIZON, score, trl_outcome
from torch import Tensor
from trl import GRPOTrainer

from algorithms.advantage import sample_advantages
from algorithms.config import (
    Aggregation,
    Bound,
    CISPOConfig,
    CorrectionConfig,
    CustomConfig,
    Estimator,
    GSPOConfig,
    KLEstimator,
    Level,
    LossConfig,
    PPOClipConfig,
    ReferenceKLConfig,
    RejectConfig,
    SAPOConfig,
    TISConfig,
)
from algorithms.reference import reference_kl_loss

LOSS = "`GRPOTrainer._compute_loss`"
SCORE = "`GRPOTrainer._generate_and_score_completions`"
BETA = 0.1


def rows(batch: Batch) -> list[Row]:
    """All rows of this file."""
    return [
        *_loss_rows(batch),
        _kl_row(batch),
        _clamp_row(batch),
        _padding_row(batch),
        _far_kl_row(batch),
        _empty_row(batch),
        *_sampling_rows(batch),
        _unscored_row(batch),
        _opsm_row(batch),
        *_advantage_rows(),
    ]


# ---------------------------------------------------------------- losses


def _loss_rows(batch: Batch) -> list[Row]:
    wide = replace(batch, theta=(batch.old + torch.randn_like(batch.old)).clamp(max=-1e-3))
    near = replace(batch, theta=batch.old + 2e-3 * torch.randn_like(batch.old))
    by_response = Aggregation.seq_mean_token_mean
    fixed = PPOClipConfig(aggregation=Aggregation.fixed_length, fixed_length_tokens=HORIZON)
    cases: tuple[tuple[str, Batch, LossConfig, dict[str, Any]], ...] = (
        ("`grpo`", wide, PPOClipConfig(aggregation=by_response), {}),
        ("`dapo`", wide, PPOClipConfig(clip_high=0.28), {"epsilon_high": 0.28}),
        ("`bnpo`", wide, PPOClipConfig(), {}),
        ("`dr_grpo`", wide, fixed, {}),
        ("`dapo`, `delta=3`", wide, PPOClipConfig(dual_clip=3.0), {"delta": 3.0}),
        (
            "`grpo`, sequence level",
            near,
            GSPOConfig(clip_low=3e-4, clip_high=4e-4),
            {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
        ),
        ("`cispo`, ratio up to 1.28", wide, CISPOConfig(high=1.28), {"epsilon_high": 1.28}),
        ("`sapo`", wide, SAPOConfig(), {}),
    )
    found = []
    for case, used, config, settings in cases:
        theirs = trl_outcome(used, loss_type=case.split("`")[1], **settings)
        name = f"{config.surrogate}, {config.aggregation.name}"
        found.append(agreement(f"TRL {case}", LOSS, theirs.difference(parity_outcome(used, config)), remark=name))
    return found


def _parity_kl(batch: Batch, reference: Tensor) -> Outcome:
    """0.1 x the token mean of the unbiased estimate, with pi_old as the sampler."""
    config = ReferenceKLConfig(coef=BETA, estimator=KLEstimator.unbiased)
    mask = batch.packed(batch.mask)
    scale = mask / mask.sum()
    return outcome(
        batch,
        lambda theta: reference_kl_loss(
            batch.packed(theta),
            ref_logprobs=batch.packed(reference),
            anchor_logprobs=batch.packed(batch.old),
            response_mask=mask,
            coefficients=scale,
            config=config,
        ),
    )


def _kl_row(batch: Batch) -> Row:
    """TRL's default KL term is Parity's `unbiased`."""
    reference = batch.old + 0.2 * torch.randn_like(batch.old)
    theirs = trl_outcome(replace(batch, advantages=0 * batch.advantages), reference=reference, beta=BETA)
    difference = theirs.difference(_parity_kl(batch, reference))
    return agreement("KL to the reference: k3 x pi_theta / pi_old", f"{LOSS}, `beta={BETA}`", difference)


def _far_kl_row(batch: Batch) -> Row:
    """One token that the reference finds e^100 times as likely as the policy."""
    theta, reference = batch.theta.clone(), batch.old.clone()
    theta[0, 0], reference[0, 0] = -101.0, -1.0
    broken = replace(batch, theta=theta, advantages=0 * batch.advantages)
    theirs = trl_outcome(broken, reference=reference, beta=BETA)
    ours = _parity_kl(broken, reference)
    lost = int((~theirs.gradient.isfinite()).sum())
    return Row(
        case="KL to the reference, one token with log pi_ref - log pi_theta = 100",
        peer=f"{LOSS}, `beta={BETA}`: loss {theirs.loss.item():.2g}, {lost} gradient not finite",
        parity=f"loss {ours.loss.item():.2g}, all gradients finite; clamped as above",
        holds=lost > 0 and bool(ours.loss.isfinite()) and bool(ours.gradient.isfinite().all()),
    )


def _clamp_row(batch: Batch) -> Row:
    """One token of one response with a log-ratio of 100."""
    theta, old, advantages = batch.theta.clone(), batch.old.clone(), batch.advantages.clone()
    theta[0, 0], old[0, 0], advantages[0] = -1.0, -101.0, -1.0
    broken = replace(batch, theta=theta, old=old, advantages=advantages)
    theirs, ours = trl_outcome(broken), parity_outcome(broken, PPOClipConfig())
    rest = parity_outcome(broken, PPOClipConfig(dual_clip=3.0))
    finite = bool(ours.gradient.isfinite().all())
    return Row(
        case="one token with a log-ratio of 100 and A < 0",
        peer=f"{LOSS}: loss {theirs.loss.item():.2g}, {int((~theirs.gradient.isfinite()).sum())} gradient not finite",
        parity=f"loss {ours.loss.item():.2g}, {'all' if finite else 'NOT all'} gradients finite, that token's "
        f"{ours.gradient[0, 0].item():g}; the log-ratio is clamped to +-20 before exp. With a dual clip of 3 the loss "
        f"is {rest.loss.item():.2g}",
        holds=bool(theirs.loss.isinf()) and not bool(theirs.gradient.isfinite().all()) and finite,
    )


def _padding_row(batch: Batch) -> Row:
    """The same log-ratio on a token that is not the policy's own."""
    hole = (batch.inside & ~batch.mask).nonzero()[0].tolist()
    theta, old, advantages = batch.theta.clone(), batch.old.clone(), batch.advantages.clone()
    theta[*hole], old[*hole], advantages[hole[0]] = -1.0, -101.0, -1.0
    broken = replace(batch, theta=theta, old=old, advantages=advantages)
    theirs = trl_outcome(broken)
    ours = parity_outcome(replace(batch, advantages=advantages), PPOClipConfig()).difference(
        parity_outcome(broken, PPOClipConfig())
    )
    return Row(
        case="a token off the mask (tool output) with a log-ratio of 100 and A < 0",
        peer=f"{LOSS}: loss {theirs.loss.item():.2g}",
        parity=f"as without it, {shown(ours)}; there the mask is a factor",
        holds=not bool(theirs.loss.isfinite()) and ours < AGREES,
    )


def _empty_row(batch: Batch) -> Row:
    """Half of the responses without a token, as when truncated ones are masked."""
    some = (torch.arange(batch.mask.shape[0]) % 2 == 0).unsqueeze(1)
    masked = replace(batch, mask=batch.mask & some)
    left = batch.responses(some[:, 0])
    config = PPOClipConfig(aggregation=Aggregation.seq_mean_token_mean)
    theirs = (trl_outcome(masked, loss_type="grpo").loss / trl_outcome(left, loss_type="grpo").loss).item()
    ours = (parity_outcome(masked, config).loss / parity_outcome(left, config).loss).item()
    return Row(
        case="every second response masked: loss over that of the others alone",
        peer=f"{LOSS}, `grpo`: {theirs:.4f}",
        parity=f"{ours:.4f}; the mean is over the responses with a token, there over all: masking shrinks the step",
        holds=abs(theirs - 0.5) < 1e-4 and abs(ours - 1) < 1e-4,
    )


# ---------------------------------------------------------------- importance sampling against the engine


def _sampling_rows(batch: Batch) -> list[Row]:
    masked: dict[str, Any] = {"bound": Bound.mask, "low": 0.5, "high": 3.0}
    low = {"vllm_importance_sampling_clip_min": 0.5}
    cases: tuple[tuple[str, CorrectionConfig, dict[str, Any]], ...] = (
        ("token_truncate", TISConfig(cap=3.0), {}),
        ("token_mask", CustomConfig(level=Level.token, **masked), low),
        ("sequence_truncate", TISConfig(level=Level.sequence, cap=3.0), {}),
        ("sequence_mask", CustomConfig(level=Level.sequence, **masked), low),
    )
    rewards = torch.rand(batch.mask.shape[0])
    found = []
    for mode, config, settings in cases:
        ratio = score(batch, rewards, vllm_importance_sampling_mode=mode, **settings)["importance_sampling_ratio"]
        theirs = ratio.expand(batch.mask.shape) * batch.mask
        difference = relative_difference(theirs, applied(corrected(config, batch), batch))
        bounds = "up to 3" if mode.endswith("truncate") else "in [0.5, 3]"
        found.append(agreement(f"weights {bounds}, `{mode}`", SCORE, difference))
    return found


def _unscored_row(batch: Batch) -> Row:
    """A token without a log-prob of the engine."""
    rollout = batch.rollout.clone()
    rollout[0, 0] = torch.nan
    unscored = replace(batch, rollout=rollout)
    theirs = score(unscored, torch.rand(rollout.shape[0]))["importance_sampling_ratio"][0, 0].item()
    ours = corrected(TISConfig(cap=3.0), unscored)
    kept = bool(batch.padded(ours.keep)[0, 0])
    lost = int(batch.mask.sum()) - int(ours.keep.sum())
    return Row(
        case="the engine's log-prob of one token is NaN, weights up to 3",
        peer=f"{SCORE}: weight {theirs:g}",
        parity=f"{'kept' if kept else 'rejected'}, weight {applied(ours, unscored)[0, 0].item():g}, {lost} token less; "
        "a ratio that is not known is not 1",
        holds=theirs == 1 and not kept and lost == 1,
    )


def _opsm_row(batch: Batch) -> Row:
    bound = 0.02
    theirs = GRPOTrainer.get_off_policy_mask(
        advantages=batch.advantages[:, :1],
        per_token_logps=batch.theta,
        sampling_per_token_logps=batch.rollout,
        mask=batch.mask.long(),
        off_policy_threshold=bound,
    )
    ours = batch.padded(corrected(CustomConfig(reject=RejectConfig(opsm=bound)), batch, trainer=batch.theta).keep)
    differing = int(((theirs.bool() & batch.mask) != ours).sum())
    kept, tokens = int(ours.sum()), int(batch.mask.sum())
    name = "`GRPOTrainer.get_off_policy_mask`"
    return verdicts_agree("off-policy sequence mask (`opsm`)", name, differing, kept=[kept], tokens=tokens)


# ---------------------------------------------------------------- advantages


def _advantage_rows() -> list[Row]:
    batch = Batch.random(drift=0.1, responses=64, longest=6)
    rewards = torch.rand(64)
    groups = torch.arange(64) // 8
    scaled = score(batch, rewards)["advantages"]
    plain = score(batch, rewards, scale_rewards="none")["advantages"]
    found = [
        agreement(
            "GRPO advantages, epsilon 1e-4",
            SCORE,
            relative_difference(scaled, sample_advantages(Estimator.grpo, rewards, groups, epsilon=1e-4)),
        ),
        agreement(
            "Dr.GRPO advantages",
            f"{SCORE}, `scale_rewards=none`",
            relative_difference(plain, sample_advantages(Estimator.dr_grpo, rewards, groups, epsilon=1e-4)),
        ),
    ]
    equal = torch.full((48,), 0.9)
    triples = torch.arange(48) // 3
    theirs = score(Batch.random(drift=0.1, responses=48, longest=6), equal, group=3)["advantages"].abs().max().item()
    ours = sample_advantages(Estimator.grpo, equal, triples, epsilon=1e-4).abs().max().item()
    found.append(
        Row(
            case="GRPO advantages of three equal rewards 0.9",
            peer=f"{SCORE}: {theirs:.1e}",
            parity=f"{ours:g}; as above, with the larger epsilon 1e-4",
            holds=ours == 0 and 0 < theirs < AGREES * 100,
        )
    )
    return found
