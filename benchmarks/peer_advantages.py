"""Rows on advantages, returns and the KL to a reference policy, against verl's `core_algos`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy
import torch
from peer_batch import AGREES, Batch, Row, agreement, relative_difference, shown
from torch import Tensor
from verl.trainer.ppo.core_algos import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_rloo_outcome_advantage,
    kl_penalty,
)

from algorithms.advantage import sample_advantages
from algorithms.config import Estimator, KLEstimator
from algorithms.reference import reference_kl
from algorithms.returns import gae, token_rewards, whiten

EPSILON = 1e-6
SMALL_EPSILON = 1e-8
"""verl's whitening adds it to the variance, Parity to the standard deviation: too little to be seen in either."""
GRPO = "`compute_grpo_outcome_advantage`"
RLOO = "`compute_rloo_outcome_advantage`"
GAE = "`compute_gae_advantage_return`"
KL = "`kl_penalty`"


def rows(batch: Batch) -> list[Row]:
    """All rows of this file."""
    return [
        *_group_rows(batch),
        _equal_row(),
        _single_row(),
        *_whitened_rows(batch),
        *_return_rows(batch),
        _one_token_row(),
        *_kl_rows(),
        _far_kl_row(),
        _near_kl_row(),
    ]


def _last_token(batch: Batch, rewards: Tensor) -> Tensor:
    """[B, L] rewards as verl takes them: on the last token of the policy."""
    last = batch.mask & (batch.mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(last, rewards.unsqueeze(1), 0.0)


def _groups(batch: Batch) -> tuple[Tensor, Tensor]:
    """Rewards [B] and ids of groups of four to twelve samples in any order [B]."""
    rewards = torch.rand(batch.mask.shape[0])
    sizes = torch.tensor([4, 12, 8]).repeat(batch.mask.shape[0] // 24)
    groups = torch.arange(len(sizes)).repeat_interleave(sizes)
    return rewards, groups[torch.randperm(len(groups))]


# ---------------------------------------------------------------- one advantage per sample; token 0 is on the mask


def _group_rows(batch: Batch) -> list[Row]:
    rewards, groups = _groups(batch)
    given = (_last_token(batch, rewards), batch.float_mask, numpy.array(groups))
    cases = (
        ("GRPO advantages", GRPO, compute_grpo_outcome_advantage(*given)[0], Estimator.grpo),
        (
            "Dr.GRPO advantages",
            f"{GRPO}, `norm_adv_by_std_in_grpo=False`",
            compute_grpo_outcome_advantage(*given, norm_adv_by_std_in_grpo=False)[0],
            Estimator.dr_grpo,
        ),
        ("RLOO advantages", RLOO, compute_rloo_outcome_advantage(*given)[0], Estimator.rloo),
    )
    found = []
    for case, peer, theirs, estimator in cases:
        ours = sample_advantages(estimator, rewards, groups, epsilon=EPSILON)
        found.append(agreement(case, peer, relative_difference(theirs[:, 0], ours)))
    return found


def _equal_row() -> Row:
    rewards = torch.full((3,), 0.9)
    theirs = compute_grpo_outcome_advantage(rewards[:, None], torch.ones(3, 1), numpy.zeros(3))[0].abs().max().item()
    one_group = torch.zeros(3, dtype=torch.int64)
    ours = sample_advantages(Estimator.grpo, rewards, one_group, epsilon=EPSILON).abs().max().item()
    return Row(
        case="GRPO advantages of three equal rewards 0.9",
        peer=f"{GRPO}: {theirs:.4f} each",
        parity=f"{ours:g}; rounding of the mean, divided by epsilon. Here the mean is float64",
        holds=ours == 0 and theirs > 0.01,
    )


def _single_row() -> Row:
    """verl takes the baseline of a group of one to be 0."""
    rewards = torch.tensor([0.7])
    given = (rewards[:, None], torch.ones(1, 1), numpy.zeros(1))
    group = torch.zeros(1, dtype=torch.int64)
    theirs = [
        compute_grpo_outcome_advantage(*(torch.clone(x) if isinstance(x, Tensor) else x for x in given))[0].item(),
        compute_rloo_outcome_advantage(*(torch.clone(x) if isinstance(x, Tensor) else x for x in given))[0].item(),
    ]
    ours = [
        sample_advantages(estimator, rewards, group, epsilon=EPSILON).item()
        for estimator in (Estimator.grpo, Estimator.rloo)
    ]
    return Row(
        case="GRPO and RLOO advantage of a group of one, reward 0.7",
        peer=f"{GRPO}: {theirs[0]:.4g}, {RLOO}: {theirs[1]:.4g}",
        parity=f"{ours[0]:g}, {ours[1]:g}; without a baseline the sign of the reward alone would push",
        holds=ours == [0, 0] and min(theirs) > 0.69,
    )


# ---------------------------------------------------------------- whitening, returns


def _whitened_rows(batch: Batch) -> list[Row]:
    """verl divides by the n - 1 standard deviation, so its result is scaled back before it is compared."""
    rewards, groups = _groups(batch)
    given = (_last_token(batch, rewards), batch.float_mask)
    num_tokens = batch.mask.sum(1)
    factor = _bessel(int(num_tokens.sum()))
    plain = compute_reinforce_plus_plus_outcome_advantage(*given, config=SimpleNamespace(gamma=1.0))[0]
    baseline = compute_reinforce_plus_plus_baseline_outcome_advantage(*given, index=numpy.array(groups))[0]
    cases = (
        ("REINFORCE++", "`compute_reinforce_plus_plus_outcome_advantage`", plain, Estimator.reinforce_pp),
        (
            "REINFORCE++-baseline",
            "`compute_reinforce_plus_plus_baseline_outcome_advantage`",
            baseline,
            Estimator.reinforce_pp_baseline,
        ),
    )
    found = []
    for case, peer, theirs, estimator in cases:
        ours = sample_advantages(estimator, rewards, groups, epsilon=SMALL_EPSILON, num_tokens=num_tokens)
        found.append(_whitened(case, peer, theirs[:, 0], ours, factor=factor))
    return found


def _bessel(number: int) -> float:
    """Standard deviation with n - 1 over that with n."""
    return (number / (number - 1)) ** 0.5


def _whitened(case: str, peer: str, theirs: Tensor, ours: Tensor, *, factor: float) -> Row:
    raw = relative_difference(theirs, ours)
    remark = f"{shown(raw)} as they are: the standard deviation has n - 1 there, n here"
    row = agreement(case, peer, relative_difference(theirs * factor, ours), remark=remark)
    return replace(row, case=f"{row.case}, up to the factor {factor:.5f}")


def _return_rows(batch: Batch) -> list[Row]:
    rewards = torch.rand(batch.mask.shape[0])
    values = torch.randn(batch.mask.shape)
    scores = _last_token(batch, rewards)
    packed = {"response_mask": batch.packed(batch.mask), "cu_seqlens": batch.cu_seqlens}
    ours_scores = token_rewards(rewards, penalty=None, **packed)
    theirs, their_returns = compute_gae_advantage_return(scores, values, batch.float_mask, 0.99, 0.95)
    advantages, returns = gae(ours_scores, batch.packed(values), **packed, gamma=0.99, gae_lambda=0.95)
    whitened = whiten(advantages, packed["response_mask"], epsilon=SMALL_EPSILON)
    mask = batch.mask
    _, their_discounted = compute_reinforce_plus_plus_outcome_advantage(
        scores, batch.float_mask, config=SimpleNamespace(gamma=0.99)
    )
    discounted = batch.padded(gae(ours_scores, torch.zeros_like(ours_scores), **packed, gamma=0.99, gae_lambda=1.0)[1])
    return [
        agreement(
            "discounted returns, gamma 0.99",
            "`compute_reinforce_plus_plus_outcome_advantage`",
            relative_difference(their_discounted[mask], discounted[mask]),
            remark="over holes in the mask",
        ),
        agreement(
            "GAE returns, gamma 0.99, lambda 0.95",
            GAE,
            relative_difference(their_returns[mask], batch.padded(returns)[mask]),
            remark="over holes in the mask",
        ),
        _whitened(
            "GAE advantages, whitened",
            GAE,
            theirs[mask],
            batch.padded(whitened)[mask],
            factor=_bessel(int(mask.sum())),
        ),
    ]


def _one_token_row() -> Row:
    """A standard deviation with n - 1 has no value for one token."""
    one = torch.ones(1, 1)
    try:
        theirs = f"{compute_gae_advantage_return(one, 0 * one, one, 1.0, 1.0)[0].item():g}"
        raised = False
    except ValueError as error:
        theirs, raised = f"ValueError, “{str(error).partition(',')[0]}”", True
    ours = whiten(torch.ones(1), torch.ones(1, dtype=torch.bool), epsilon=EPSILON).item()
    return Row(
        case="whitening of one token",
        peer=f"{GAE}: {theirs}",
        parity=f"{ours:g}; with n in place of n - 1 one token needs no case of its own",
        holds=raised and ours == 0,
    )


# ---------------------------------------------------------------- KL to a reference


def _value_and_gradient(estimate: Callable[[Tensor], Tensor], logprobs: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logprobs.clone().requires_grad_()
    values = estimate(leaf)
    return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]


def _verl_kl(name: str, logprobs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    return _value_and_gradient(lambda leaf: kl_penalty(leaf, reference, name), logprobs)


def _parity_kl(estimator: KLEstimator, logprobs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    return _value_and_gradient(
        lambda leaf: reference_kl(leaf, ref_logprobs=reference, anchor_logprobs=None, estimator=estimator), logprobs
    )


def _kl_rows() -> list[Row]:
    logprobs = -0.05 - 4 * torch.rand(1000)
    reference = logprobs + 0.5 * torch.randn(1000).clamp(-3, 3)
    found = []
    for name, estimator in (("kl", KLEstimator.k1), ("mse", KLEstimator.k2), ("low_var_kl", KLEstimator.k3)):
        theirs = _verl_kl(name, logprobs, reference)
        ours = _parity_kl(estimator, logprobs, reference)
        worst = max(relative_difference(a, b) for a, b in zip(theirs, ours, strict=True))
        case = f"KL estimator `{estimator.name}`, log-ratios up to 1.5: value, gradient"
        found.append(agreement(case, f"{KL}, `{name}`", worst))
    value, gradient = _verl_kl("low_var_kl+", logprobs, reference)
    worst = max(
        relative_difference(value, _parity_kl(KLEstimator.k3, logprobs, reference)[0]),
        relative_difference(gradient, _parity_kl(KLEstimator.k2, logprobs, reference)[1]),
    )
    case = "value of `k3` with the gradient of `k2`"
    found.append(agreement(case, f"{KL}, `low_var_kl+`", worst, remark="two estimators here"))
    return found


def _far_kl_row() -> Row:
    """log pi_ref - log pi_theta = 3: the policy has nearly lost a token that the reference likes."""
    logprobs, reference = torch.tensor([-4.0]), torch.tensor([-1.0])
    theirs = [tensor.item() for tensor in _verl_kl("low_var_kl", logprobs, reference)]
    ours = [tensor.item() for tensor in _parity_kl(KLEstimator.k3, logprobs, reference)]
    return Row(
        case="`k3` at log pi_ref - log pi_theta = 3: value, gradient",
        peer=f"{KL}, `low_var_kl`: {theirs[0]:.2f}, {theirs[1] + 0.0:.2f}",
        parity=f"{ours[0]:.2f}, {ours[1]:.2f}; e^3 - 4 and 1 - e^3. There the value is cut at 10, and a cut value "
        "has no gradient",
        holds=theirs == [10, 0] and abs(ours[0] - 16.0855) < 1e-3 and abs(ours[1] + 19.0855) < 1e-3,
    )


def _near_kl_row() -> Row:
    logprobs = -0.05 - 4 * torch.rand(10_000)
    reference = logprobs + 1e-4
    log_ratio = reference.double() - logprobs.double()
    exact = (torch.expm1(log_ratio) - log_ratio).mean().item()
    theirs = _verl_kl("low_var_kl", logprobs, reference)[0].double().mean().item()
    ours = _parity_kl(KLEstimator.k3, logprobs, reference)[0].double().mean().item()
    errors = [abs(value - exact) / exact for value in (theirs, ours)]
    return Row(
        case="`k3` at log pi_ref - log pi_theta = 1e-4, float32",
        peer=f"{KL}, `low_var_kl`: {theirs:.2e}, off by {errors[0]:.0%}",
        parity=f"{ours:.2e}, off by {errors[1]:.0e}; float64 says {exact:.2e}",
        holds=errors[0] > 0.01 and errors[1] < AGREES,
    )
