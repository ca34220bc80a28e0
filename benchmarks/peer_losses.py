"""Rows on the policy losses, their aggregation and the value loss, against verl's `core_algos`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from peer_batch import (
    AGREES,
    Batch,
    Outcome,
    Row,
    agreement,
    coefficients,
    outcome,
    parity_outcome,
    relative_difference,
    shown,
)
from peer_presets import actor_config
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, compute_value_loss, get_policy_loss_fn
from verl.workers.config import ActorConfig

from algorithms.config import (
    Aggregation,
    CISPOConfig,
    DPPOKLConfig,
    DPPOTVConfig,
    GSPOConfig,
    LossConfig,
    PPOClipConfig,
    SAPOConfig,
)
from algorithms.value import value_loss

NO_DUAL_CLIP = 1e9
"""verl always applies a dual clip; this one never binds."""
CAP = 20.0
AGGREGATIONS = {
    "token-mean": Aggregation.token_mean,
    "seq-mean-token-sum": Aggregation.seq_mean_token_sum,
    "seq-mean-token-mean": Aggregation.seq_mean_token_mean,
    "seq-mean-token-sum-norm": Aggregation.fixed_length,
    "token-sum": Aggregation.token_sum,
}


def rows(batch: Batch) -> list[Row]:
    """All rows of this file."""
    return [
        *_ppo_rows(batch),
        *_gspo_rows(batch),
        *_other_rows(batch),
        *_dppo_rows(batch),
        _aggregation_row(batch),
        _value_row(batch),
    ]


def name_of(mode: str) -> str:
    """verl's function for a loss mode, as code."""
    return f"`{get_policy_loss_fn(mode).__name__}`"


def verl_outcome(batch: Batch, mode: str, aggregation: str, config: ActorConfig) -> Outcome:
    """One of verl's policy losses on the padded batch."""
    function = get_policy_loss_fn(mode)
    return outcome(
        batch,
        lambda theta: function(batch.old, theta, batch.advantages, batch.float_mask, aggregation, config)[0],
    )


def _wide(batch: Batch) -> Batch:
    """Ratios up to about e^4, so that every bound binds somewhere."""
    return replace(batch, theta=(batch.old + torch.randn_like(batch.old)).clamp(max=-1e-3))


def _ppo_rows(batch: Batch) -> list[Row]:
    found = []
    batch = _wide(batch)
    for dual_clip, case in (
        (None, "PPO clip 0.2 / 0.28, token mean"),
        (3.0, "PPO clip 0.2 / 0.28 with dual clip 3, token mean"),
    ):
        actor = actor_config(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=dual_clip or NO_DUAL_CLIP)
        ours = parity_outcome(batch, PPOClipConfig(clip_low=0.2, clip_high=0.28, dual_clip=dual_clip))
        theirs = verl_outcome(batch, "vanilla", "token-mean", actor)
        zero = _without_gradient(batch, ours)
        found.append(agreement(case, name_of("vanilla"), theirs.difference(ours), remark=f"{zero:.1%} clipped"))
    return found


def _without_gradient(batch: Batch, result: Outcome) -> float:
    """Share of the batch's own tokens that the loss does not move."""
    return (result.gradient[batch.mask] == 0).float().mean().item()


def _gspo_rows(batch: Batch) -> list[Row]:
    """A mean over a response hardly leaves 1, so the drift is small here."""
    near = replace(batch, theta=batch.old + 2e-3 * torch.randn_like(batch.old))
    config = GSPOConfig(clip_low=3e-4, clip_high=4e-4)
    actor = actor_config(clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    ours = parity_outcome(near, config)
    theirs = verl_outcome(near, "gspo", "seq-mean-token-mean", actor)
    share = _without_gradient(near, ours)
    same = agreement("GSPO 3e-4 / 4e-4", name_of("gspo"), theirs.difference(ours), remark=f"{share:.1%} clipped")

    # What an engine leaves behind the end of a response may be anything.
    broken = replace(near, old=torch.where(near.mask, near.old, torch.nan))
    theirs = verl_outcome(broken, "gspo", "seq-mean-token-mean", actor)
    still = ours.difference(parity_outcome(broken, config))
    difference = Row(
        case="GSPO, log pi_old is NaN off the mask",
        peer=f"{name_of('gspo')}: loss {theirs.loss.item():.3g}",
        parity=f"as without the NaN, {shown(still)}; there the mask is a factor, and 0 x NaN is NaN",
        holds=bool(theirs.loss.isnan()) and still < AGREES,
    )
    return [same, difference]


def _other_rows(batch: Batch) -> list[Row]:
    cispo = verl_outcome(batch, "cispo", "token-mean", actor_config(clip_ratio_low=0.2, clip_ratio_high=0.28))
    sapo = verl_outcome(batch, "sapo", "seq-mean-token-mean", actor_config(tau_pos=1.0, tau_neg=1.05))
    return [
        agreement(
            "CISPO, ratio in [0.8, 1.28]",
            f"{name_of('cispo')}, 0.2 and 0.28",
            cispo.difference(parity_outcome(batch, CISPOConfig(low=0.8, high=1.28))),
        ),
        agreement("SAPO 1.0 / 1.05", name_of("sapo"), sapo.difference(parity_outcome(batch, SAPOConfig()))),
    ]


def _dppo_rows(batch: Batch) -> list[Row]:
    """The value differs by construction (-r A log pi there, -r A here); the gradient is what moves the policy."""
    wide = _wide(batch)
    configs: tuple[tuple[str, DPPOTVConfig | DPPOKLConfig], ...] = (
        ("dppo_tv", DPPOTVConfig(threshold=0.2)),
        ("dppo_kl", DPPOKLConfig(threshold=0.05)),
    )
    found = []
    for mode, config in configs:
        ours = parity_outcome(wide, config)
        bounds = {"clip_ratio_low": config.threshold, "clip_ratio_high": config.threshold}
        theirs = verl_outcome(wide, mode, "token-mean", actor_config(**bounds, clip_ratio_c=CAP))
        found.append(
            agreement(
                f"{mode}, threshold {config.threshold:g}, cap {CAP:g}: gradient",
                f"{name_of(mode)}, `clip_ratio_c={CAP:g}`",
                relative_difference(theirs.gradient, ours.gradient),
                remark=f"{_without_gradient(wide, ours):.1%} dropped",
            )
        )
        found.append(_cap_row(wide, mode, ours, actor_config(**bounds)))
    return found


def _cap_row(batch: Batch, mode: str, ours: Outcome, actor: ActorConfig) -> Row:
    """verl's cap has the name of the dual clip, whose default it takes."""
    theirs = verl_outcome(batch, mode, "token-mean", actor)
    ratio = (batch.theta - batch.old).exp()
    cut = batch.mask & (ours.gradient != 0) & (ratio > actor.clip_ratio_c)
    shrunk = (theirs.gradient[cut] / ours.gradient[cut]).min().item()
    return Row(
        case=f"{mode} with the cap left alone ({int(cut.sum())} kept tokens with r > {actor.clip_ratio_c:g})",
        peer=f"{name_of(mode)}: cap {actor.clip_ratio_c:g}, gradients down to {shrunk:.2f} of those with cap {CAP:g}",
        parity=f"cap {CAP:g}; verl's function means {CAP:g} too, but reads the dual clip's key, which is set",
        holds=actor.clip_ratio_c == 3 and shrunk < 0.9,
    )


def _aggregation_row(batch: Batch) -> Row:
    batch = replace(batch, mask=batch.mask & (torch.arange(batch.mask.shape[0]) > 1).unsqueeze(1))
    losses = torch.rand(batch.mask.shape)
    horizon = 64
    worst = 0.0
    for mode, aggregation in AGGREGATIONS.items():
        theirs = agg_loss(losses, batch.float_mask, mode, loss_scale_factor=horizon)
        fixed = horizon if aggregation is Aggregation.fixed_length else None
        scale = coefficients(batch, LossConfig(aggregation=aggregation, fixed_length_tokens=fixed))
        worst = max(worst, relative_difference(theirs, (batch.packed(losses) * scale).sum()))
    modes = ", ".join(f"`{mode}`" for mode in AGGREGATIONS)
    return agreement(
        f"aggregation: {modes}", "`agg_loss`, counts left to it", worst, remark="with two empty responses in the batch"
    )


def _value_row(batch: Batch) -> Row:
    """0.5 max((V - R)^2, (clipped V - R)^2), loss and gradient."""
    old_values, returns = torch.randn(2, *batch.mask.shape)
    values = old_values + 0.5 * torch.randn_like(old_values)
    scale = coefficients(batch, PPOClipConfig())

    def gradient(loss_of: Callable[[Tensor], Tensor]) -> Outcome:
        leaf = values.clone().requires_grad_()
        loss = loss_of(leaf)
        return Outcome(loss=loss.detach(), gradient=torch.autograd.grad(loss, leaf)[0])

    theirs = gradient(lambda leaf: compute_value_loss(leaf, returns, old_values, batch.float_mask, 0.5)[0])
    ours = gradient(
        lambda leaf: (
            value_loss(
                batch.packed(leaf),
                old_values=batch.packed(old_values),
                returns=batch.packed(returns),
                response_mask=batch.packed(batch.mask),
                coefficients=scale,
                clip=0.5,
            ).loss
        )
    )
    share = _without_gradient(batch, ours)
    return agreement(
        "value loss, clip 0.5", "`compute_value_loss`", theirs.difference(ours), remark=f"{share:.1%} clipped"
    )
