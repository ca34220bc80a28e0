"""Rows on the presets: weights, mask, loss and gradient of the same name in verl and in Parity."""

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
)
from torch import Tensor
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import compute_policy_loss_bypass_mode, compute_policy_loss_vanilla
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig

from algorithms.config import PRESETS, Aggregation, CorrectionConfig, CustomConfig, PPOClipConfig, RejectedDenominator
from algorithms.config.combine import resolved_loss
from algorithms.config.spec import Compared
from algorithms.correction import Correction

CORRECTION = "`compute_rollout_correction_and_rejection_mask`"
DUAL_CLIP = 3.0
"""verl's default; it has no value for off."""


def rows(batch: Batch) -> list[Row]:
    """All rows of this file."""
    return [*_preset_rows(batch), _sequence_mean_row(batch), _missing_row(batch)]


def actor_config(**values: Any) -> ActorConfig:
    """verl's actor config with what the losses read."""
    return ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **values)


def _sequence_mean_row(batch: Batch) -> Row:
    """Under a mean over responses verl's trainer divides by all responses of the step, rejected ones included."""
    name = "decoupled_geo_rs_token_tis"
    config = PRESETS[name]
    assert isinstance(config, CustomConfig)
    _, _, theirs = _verl_preset(getattr(RolloutCorrectionConfig, name)(), batch, aggregation="seq-mean-token-mean")
    correction = corrected(config, batch)
    dropped, kept = (
        _parity_preset(variant, correction, batch, aggregation=Aggregation.seq_mean_token_mean)
        for variant in (config, replace(config, rejected_denominator=RejectedDenominator.keep))
    )
    share = (batch.padded(correction.keep).any(1).sum() / len(batch.mask)).item()
    same = theirs.difference(kept)
    return Row(
        case=f"`{name}` with seq-mean-token-mean, {share:.3f} of the responses kept",
        peer=f"{CORRECTION}, `global_batch_size` as its trainer sets it: loss {theirs.loss.item():.4f}",
        parity=f"loss {dropped.loss.item():.4f}, ratio {(theirs.loss / dropped.loss).item():.3f}; the preset drops "
        f"rejected responses from every denominator, verl from that of token-mean alone. The same, {shown(same)}, with "
        "`rejected_denominator=keep`",
        holds=same < AGREES and abs((theirs.loss / dropped.loss).item() - share) < 1e-4 and share < 1,
    )


def _missing_row(batch: Batch) -> Row:
    """A token of which the engine returned no log-prob."""
    rollout = batch.rollout.clone()
    rollout[0, 0] = torch.nan
    broken = replace(batch, rollout=rollout)
    _, _, theirs = _verl_preset(RolloutCorrectionConfig.decoupled_token_is(), broken)
    config = PRESETS["decoupled_token_is"]
    correction = corrected(config, broken)
    ours = _parity_preset(config, correction, broken)
    lost = int(batch.mask.sum()) - int(correction.keep.sum())
    return Row(
        case="the engine's log-prob of one token is NaN, `decoupled_token_is`",
        peer=f"{CORRECTION}: loss {theirs.loss.item():.2g}",
        parity=f"loss {ours.loss.item():.2g}, {lost} token rejected and counted",
        holds=bool(theirs.loss.isnan()) and bool(ours.loss.isfinite()) and lost == 1,
    )


def _preset_rows(batch: Batch) -> list[Row]:
    """Every preset of verl: weights and mask, then loss and gradient through both libraries."""
    names = [name for name in PRESETS if hasattr(RolloutCorrectionConfig, name)]
    weights, losses, rejecting = {}, {}, 0
    for name in names:
        theirs, mask, loss = _verl_preset(getattr(RolloutCorrectionConfig, name)(), batch)
        config = PRESETS[name]
        current = config.spec().compared is Compared.current
        correction = corrected(config, batch, trainer=batch.theta if current else None)
        ours = applied(correction, batch)
        rejecting += 0 < int((ours > 0).sum()) < int(batch.mask.sum())
        weights[name] = relative_difference(theirs * mask, ours)
        losses[name] = loss.difference(_parity_preset(config, correction, batch))
    worst_weight, worst_loss = max(weights, key=weights.__getitem__), max(losses, key=losses.__getitem__)
    remark = f"{rejecting} of them reject some tokens; largest in `{worst_weight}`"
    return [
        agreement(
            f"{len(names)} presets: weights x mask",
            CORRECTION,
            weights[worst_weight],
            remark=remark,
        ),
        agreement(
            f"{len(names)} presets: loss and gradient, token mean, dual clip 3",
            "the same, then `compute_policy_loss_vanilla` or `compute_policy_loss_bypass_mode`",
            losses[worst_loss],
            remark=f"largest in `{worst_loss}`; rejected tokens leave the denominator in the decoupled presets and "
            "stay in the bypass ones, in both libraries",
        ),
    ]


def _verl_preset(
    config: RolloutCorrectionConfig, batch: Batch, *, aggregation: str = "token-mean"
) -> tuple[Tensor, Tensor, Outcome]:
    """Weights [B, L], mask [B, L] and outcome of one of verl's presets, as its trainer composes it."""
    trainer = batch.theta if config.bypass_mode else batch.old
    proto, mask, _ = compute_rollout_correction_and_rejection_mask(
        trainer,
        batch.rollout,
        batch.float_mask,
        rollout_is=config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_is_batch_normalize=config.rollout_is_batch_normalize,
        rollout_rs=config.rollout_rs,
        rollout_rs_threshold=config.rollout_rs_threshold,
    )
    weights = None if proto is None else proto.batch["rollout_is_weights"]
    actor = actor_config(clip_ratio_c=DUAL_CLIP)
    # The mask that the trainer counts: the decoupled mode has rejected by then, the bypass mode rejects in the loss.
    counted = batch.float_mask if config.bypass_mode else mask
    actor = replace(
        actor,
        policy_loss=replace(actor.policy_loss, rollout_correction=config),
        global_batch_info={"batch_num_tokens": int(counted.sum()), "global_batch_size": len(mask)},
    )

    def loss_of(theta: Tensor) -> Tensor:
        given = (theta, batch.advantages, counted, aggregation, actor)
        if config.bypass_mode:
            return compute_policy_loss_bypass_mode(batch.rollout, *given)[0]
        return compute_policy_loss_vanilla(batch.old, *given, rollout_is_weights=weights)[0]

    return torch.ones_like(mask) if weights is None else weights, mask, outcome(batch, loss_of)


def _parity_preset(
    config: CorrectionConfig, correction: Correction, batch: Batch, *, aggregation: Aggregation = Aggregation.token_mean
) -> Outcome:
    loss = resolved_loss(config, PPOClipConfig(dual_clip=DUAL_CLIP, aggregation=aggregation))
    drops = config.spec().rejected_denominator is RejectedDenominator.drop
    return parity_outcome(
        batch, loss, correction=correction, denominator=batch.padded(correction.keep) if drops else None
    )
