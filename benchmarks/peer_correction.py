"""Rows on the correction: weights, rejection and metrics against verl's rollout correction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from peer_batch import AGREES, Batch, Row, agreement, applied, corrected, relative_difference, shown, verdicts_agree
from torch import Tensor
from verl.trainer.ppo.rollout_corr_helper import (
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)

from algorithms.config import (
    Bound,
    CustomConfig,
    Level,
    RejectConfig,
    SelfNormalize,
    TISConfig,
)
from algorithms.correction import correct, weight_total
from algorithms.kl import k3
from algorithms.mismatch import mismatch_stats
from algorithms.tokens import Tokens

WEIGHTS = "`compute_rollout_correction_weights`"
REJECTION = "`compute_rollout_rejection_mask`"
METRICS = "`compute_offpolicy_metrics`"


def rows(batch: Batch) -> list[Row]:
    """All rows of this file."""
    return [
        *_weight_rows(batch),
        _normalised_mask_row(batch),
        *_rejection_rows(batch),
        _interval_row(),
        _raw_sum_row(),
        *_metric_rows(batch),
        _small_k3_row(),
        _empty_row(batch),
    ]


def _verl_weights(batch: Batch, level: str, threshold: str | float, *, normalise: bool = False) -> Tensor:
    weights, _ = compute_rollout_correction_weights(
        batch.old - batch.rollout,
        batch.float_mask,
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=normalise,
    )
    return weights


def _weight_rows(batch: Batch) -> list[Row]:
    found = []
    for level in (Level.token, Level.sequence):
        config = TISConfig(level=level, cap=2.0)
        correction = corrected(config, batch)
        total, number = weight_total(config.spec(), correction, cu_seqlens=batch.cu_seqlens)
        ours = applied(correction, batch)
        plain = relative_difference(_verl_weights(batch, level.name, 2.0), ours)
        mean_one = relative_difference(
            _verl_weights(batch, level.name, 2.0, normalise=True), ours / (total / number).float()
        )
        found.append(agreement(f"weights `min(rho, 2)`, {level.name} level", WEIGHTS, plain))
        case = f"weights `min(rho, 2)` divided by their mean, {level.name} level"
        found.append(agreement(case, f"{WEIGHTS}, `rollout_is_batch_normalize`", mean_one))
    icepop = relative_difference(_verl_weights(batch, "token", "0.5_5.0"), applied(corrected(_icepop(), batch), batch))
    found.append(agreement("IcePop weights, masked outside [0.5, 5]", f"{WEIGHTS}, `0.5_5.0`", icepop))
    return found


def _icepop(self_normalize: SelfNormalize = SelfNormalize.none) -> CustomConfig:
    return CustomConfig(level=Level.token, bound=Bound.mask, low=0.5, high=5.0, self_normalize=self_normalize)


def _normalised_mask_row(batch: Batch) -> Row:
    """verl's normaliser counts the tokens that IcePop rejected, ours does not."""
    config = _icepop(SelfNormalize.mean_one)
    correction = corrected(config, batch)
    total, number = weight_total(config.spec(), correction, cu_seqlens=batch.cu_seqlens).tolist()
    theirs = _verl_weights(batch, "token", "0.5_5.0", normalise=True)
    keep = batch.padded(correction.keep)
    theirs_mean = theirs[keep].mean().item()
    ours_mean = applied(correction, batch)[keep].mean().item() / (total / number)
    share = number / int(batch.mask.sum())
    return Row(
        case=f"IcePop weights divided by their mean, {share:.2%} of the tokens kept",
        peer=f"{WEIGHTS}: mean of the kept weights {theirs_mean:.4f}",
        parity=f"{ours_mean:.4f}; the mean is that of the kept tokens, there that of all with 0 for rejected ones: a "
        "rejection then raises every other weight",
        holds=abs(ours_mean - 1) < AGREES and abs(theirs_mean * share - 1) < 1e-4 and share < 1,
    )


_CRITERIA = (
    ("token level", (("token_k1", "0.8_1.25"), ("token_k3", "0.02"))),
    ("sum over the response", (("seq_sum_k1", "0.8_1.25"),)),
    ("mean over the response", (("seq_mean_k1", "0.96_1.0416667"), ("seq_mean_k3", "0.05"))),
    ("maximum over the response", (("seq_max_k3", "0.5"),)),
)
_RATIO_NAMES = {"token_k1": "token_ratio", "seq_sum_k1": "sequence_ratio", "seq_mean_k1": "geometric_ratio"}


def _rejection_rows(batch: Batch) -> list[Row]:
    found = []
    tokens = int(batch.mask.sum())
    for level, options in _CRITERIA:
        differing, kept = 0, []
        for option, threshold in options:
            theirs, _ = compute_rollout_rejection_mask(
                batch.old - batch.rollout, batch.float_mask, rollout_rs=option, rollout_rs_threshold=threshold
            )
            ours = batch.padded(corrected(CustomConfig(reject=_reject(option, threshold)), batch).keep)
            differing += int((theirs.bool() != ours).sum())
            kept.append(int(ours.sum()))
        names = ", ".join(f"`{option}`" for option, _ in options)
        case = f"rejection, {level}"
        found.append(verdicts_agree(case, f"{REJECTION}: {names}", differing, kept=kept, tokens=tokens))
    return found


def _reject(option: str, threshold: str) -> RejectConfig:
    """The criterion of Parity for an option of verl."""
    if option in _RATIO_NAMES:
        low, high = map(float, threshold.split("_"))
        ratio: dict[str, Any] = {_RATIO_NAMES[option]: [low, high]}
        return RejectConfig(**ratio)
    divergence: dict[str, Any] = {option.removeprefix("seq_"): float(threshold)}
    return RejectConfig(**divergence)


def _interval_row() -> Row:
    """An interval that is not its own reciprocal tells rho from 1 / rho."""
    ratios = torch.tensor([[0.55, 1.5, 1.65]])
    mask = torch.ones_like(ratios)
    theirs, _ = compute_rollout_rejection_mask(
        ratios.log(), mask, rollout_rs="token_k1", rollout_rs_threshold="0.6_1.6"
    )
    ours = correct(
        CustomConfig(reject=RejectConfig(token_ratio=[0.6, 1.6])).spec(),
        Tokens(
            trainer_logprobs=ratios[0].log() - 1,
            rollout_logprobs=torch.full((3,), -1.0),
            response_mask=torch.ones(3, dtype=torch.bool),
            cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
        ),
    ).keep
    return Row(
        case="`k1` interval [0.6, 1.6], rho = 0.55, 1.5, 1.65",
        peer=f"{REJECTION}: {_words(theirs[0].bool())}",
        parity=f"{_words(ours)}; the bounds are on rho, there on 1/rho = 1.82, 0.67, 0.61",
        holds=theirs[0].tolist() == [0, 1, 1] and ours.tolist() == [False, True, False],
    )


def _raw_sum_row() -> Row:
    """Log-ratios of 25 and -22: the product of the response is e^3."""
    rollout, old = torch.tensor([-25.1, -0.1]), torch.tensor([-0.1, -22.1])
    mask = torch.ones(1, 2)
    delta = (old - rollout).unsqueeze(0)
    theirs, _ = compute_rollout_rejection_mask(delta, mask, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0")
    weight, _ = compute_rollout_correction_weights(delta, mask, rollout_is="sequence", rollout_is_threshold=100.0)
    ours = correct(
        CustomConfig(reject=RejectConfig(sequence_ratio=[0.5, 2.0])).spec(),
        Tokens(
            trainer_logprobs=old,
            rollout_logprobs=rollout,
            response_mask=torch.ones(2, dtype=torch.bool),
            cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        ),
    ).keep
    return Row(
        case="product in [0.5, 2], log-ratios 25 and -22",
        peer=f"{REJECTION}, `seq_sum_k1`: {_words(theirs[0].bool())}; {WEIGHTS}: weight {weight[0, 0].item():.1f}",
        parity=f"{_words(ours)}; the product is e^3 = 20.1. There each log-ratio is clamped to +-20 before the sum",
        holds=theirs[0].tolist() == [1, 1] and ours.tolist() == [False, False],
    )


def _words(keep: Tensor) -> str:
    return ", ".join("keep" if kept else "reject" for kept in keep.tolist())


_METRICS = {
    "kl": "k1",
    "k3_kl": "k3",
    "training_ppl": "ppl/train",
    "rollout_ppl": "ppl/rollout",
    "log_ppl_diff": "ppl/log_diff",
    "log_ppl_abs_diff": "ppl/log_abs_diff",
    "ppl_ratio": "ppl/ratio",
    "chi2_token": "chi2_token",
    "chi2_seq": "chi2_seq",
}
METRICS_AGREE = 1e-4
"""Bound on the relative difference of metrics."""


def _metric_rows(batch: Batch) -> list[Row]:
    theirs = compute_offpolicy_metrics(batch.old, batch.rollout, batch.float_mask)
    _, _, prefixed = compute_rollout_correction_and_rejection_mask(
        batch.old, batch.rollout, batch.float_mask, rollout_is="token", rollout_is_threshold=2.0
    )
    ours = mismatch_stats(
        Tokens(
            trainer_logprobs=batch.packed(batch.old),
            rollout_logprobs=batch.packed(batch.rollout),
            response_mask=batch.packed(batch.mask),
            cu_seqlens=batch.cu_seqlens,
        ),
        corrected(TISConfig(cap=2.0), batch),
    ).metrics()
    differences = {
        name: abs(theirs[name] - (ours[f"mismatch/{key}"] or 0.0)) / abs(theirs[name]) for name, key in _METRICS.items()
    }
    ess = prefixed["rollout_corr/rollout_is_eff_sample_size"]
    differences["rollout_is_eff_sample_size"] = abs(ess - (ours["mismatch/ess/applied_token"] or 0.0)) / ess
    listed = ", ".join(f"`{name}` {shown(difference)}" for name, difference in differences.items())
    return [
        Row(
            case="metrics, one batch",
            peer=f"{METRICS}, `compute_is_metrics`",
            parity=f"same; {listed}",
            holds=max(differences.values()) < METRICS_AGREE,
            agrees=True,
        )
    ]


def _empty_row(batch: Batch) -> Row:
    """Every second response without a token: metrics over those of the others alone."""
    some = torch.arange(batch.mask.shape[0]) % 2 == 0
    theirs, ours = [], []
    for part in (replace(batch, mask=batch.mask & some.unsqueeze(1)), batch.responses(some)):
        theirs.append(compute_offpolicy_metrics(part.old, part.rollout, part.float_mask))
        ours.append(
            mismatch_stats(
                Tokens(
                    trainer_logprobs=part.packed(part.old),
                    rollout_logprobs=part.packed(part.rollout),
                    response_mask=part.packed(part.mask),
                    cu_seqlens=part.cu_seqlens,
                )
            ).metrics()
        )
    names = ("training_ppl", "chi2_seq")
    ratios = [theirs[0][name] / theirs[1][name] for name in names]
    own = [
        (ours[0][f"mismatch/{_METRICS[name]}"] or 0) / (ours[1][f"mismatch/{_METRICS[name]}"] or 1) for name in names
    ]
    return Row(
        case="every second response empty: perplexity and sequence chi2 over those of the others alone",
        peer=f"{METRICS}: {ratios[0]:.3f}, {ratios[1]:.3f}",
        parity=f"{own[0]:.3f}, {own[1]:.3f}; an empty response has neither, there it counts with 1 and with 0",
        holds=max(ratios) < 0.9 and all(abs(ratio - 1) < AGREES for ratio in own),
    )


def _small_k3_row() -> Row:
    """k3 is a difference of two nearly equal numbers."""
    number = 10_000
    rollout = (-0.05 - 4 * torch.rand(number)).float()
    old = rollout + torch.where(torch.arange(number) % 2 == 0, 1e-4, -1e-4)
    delta = old.double() - rollout.double()
    exact = (torch.expm1(delta) - delta).mean().item()
    theirs = compute_offpolicy_metrics(old[None], rollout[None], torch.ones(1, number))["k3_kl"]
    ours = k3(old - rollout).double().mean().item()
    metric = mismatch_stats(
        Tokens(
            trainer_logprobs=old,
            rollout_logprobs=rollout,
            response_mask=torch.ones(number, dtype=torch.bool),
            cu_seqlens=torch.tensor([0, number], dtype=torch.int32),
        )
    ).metrics()["mismatch/k3"]
    errors = [abs(value - exact) / exact for value in (theirs, ours, metric or 0.0)]
    return Row(
        case="`k3` at log-ratios of +-1e-4, float32",
        peer=f"{METRICS}: {theirs:.2e}, off by {errors[0]:.0%}",
        parity=f"{ours:.2e}, off by {errors[1]:.0e} (metric {errors[2]:.0e}); float64 says {exact:.2e}. "
        "exp(x) - 1 - x loses its digits in float32",
        holds=errors[0] > 0.01 and errors[1] < AGREES and errors[2] < METRICS_AGREE,
    )
