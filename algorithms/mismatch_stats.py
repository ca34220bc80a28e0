"""Log-probs, the correction and its context -> the sums of all mismatch metrics, without reading a value.

`algorithms.token_sums` passes over the tokens once; here its sums per sequence become sums over sequences.
`algorithms.mismatch_report` turns the sums into metrics.

T: packed tokens, N: sequences, V: rejection criteria.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from algorithms.correction import EFFECTS, Applied, Correction
from algorithms.gap import Gap
from algorithms.kl import bounded_exp, k3
from algorithms.masked import require_packed
from algorithms.sketch import SEQUENCE_KIND, UNREAD_KIND, add_log_ratios, flat_sketch, new_table
from algorithms.token_sums import TOKEN_SUMS, Extras, SequenceSums, TokenTotals

NUM_LAGS: Final = 8
"""Buckets of the weight lag 0, 1, ..., the last one for all larger lags."""

NUMBERS: Final = ("tokens", "valid", "kept")
"""Of response tokens."""
SEQUENCE_SUMS: Final = (
    "sequences",
    "invalid_samples",
    "train_ppl",
    "rollout_ppl",
    "log_ppl_diff",
    "abs_log_ppl_diff",
    "ppl_ratio",
    "ratio",
    "ratio_squared",
    "weight",
    "mean_weight",
    "mean_weight_squared",
    "kept_responses",
    "rejected_responses",
    "kept_len",
    "rejected_len",
    "rewarded_kept",
    "rewarded_rejected",
    "kept_reward",
    "rejected_reward",
)
"""Sums over sequences: up to mean_weight_squared those with a valid token, then those with a response token."""
COUNTS: Final = ("corrected_tokens", "corrected_valid", "corrected_sequences", "entropy_tokens")
"""NUMBERS and sequences, of the micro-batches that had a correction or an entropy only."""
SCALARS: Final = (*TOKEN_SUMS, *NUMBERS, *EFFECTS, *SEQUENCE_SUMS, *COUNTS)


class StepContext(NamedTuple):
    """What the statistics may know besides log-probs; None leaves the metrics that need it None."""

    advantages: Tensor | None = None
    """[T] float32."""
    rewards: Tensor | None = None
    """[N] float32, one per sequence."""
    entropy: Tensor | None = None
    """[T] float32, nats."""
    lags: Tensor | None = None
    """[N] int64 >= 0, policy updates between the weights that sampled a sequence and those that are trained."""
    token_lags: Tensor | None = None
    """[T] int64 >= 0, the same of every token, where a sequence has tokens of several weights; then `lags` is not read.
    """


class MismatchSums:
    """The sums of one micro-batch on its device, piece by piece."""

    def __init__(self, response_mask: Tensor, cu_seqlens: Tensor, context: StepContext) -> None:
        """Arguments as in `algorithms.diagnostics.mismatch_stats`; a wrong shape or dtype is a ValueError."""
        per_token = {"advantages": context.advantages, "entropy": context.entropy}
        require_packed(response_mask, **{name: tensor for name, tensor in per_token.items() if tensor is not None})
        self._num_sequences = cu_seqlens.numel() - 1
        _require_per_sequence(self._num_sequences, rewards=context.rewards, lags=context.lags)
        lags = context.token_lags
        if lags is not None and (lags.shape, lags.dtype) != (response_mask.shape, torch.int64):
            wanted = f"token_lags must be [T] = {list(response_mask.shape)} int64"
            raise ValueError(f"{wanted}, got {list(lags.shape)} {lags.dtype}.")
        self._context = context
        self._table = new_table(response_mask.device)
        self._tokens = TokenTotals(self._table, with_k3=context.lags is not None)
        self._by_token_lag = torch.zeros(2, NUM_LAGS, dtype=torch.float64, device=response_mask.device)

    def add(self, tokens: slice, gap: Gap, applied: Applied | None) -> None:
        """Count the sequences of `gap`, which lie at `tokens`, and what the correction applied to them."""
        context = self._context
        extras = Extras(advantages=context.advantages, entropy=context.entropy)
        self._tokens.add(gap, extras.part(tokens), applied)
        if context.token_lags is not None:
            lags = context.token_lags[tokens].clamp(0, NUM_LAGS - 1)
            columns = torch.stack([k3(gap.delta).double(), gap.valid.double()])
            self._by_token_lag.scatter_add_(1, lags.expand_as(columns), columns)

    def joined(self, correction: Correction | None) -> tuple[Tensor, Tensor]:
        """(sums, maxes).

        sums [K] float64: SCALARS, rejected tokens by criterion [V], sequences with such a token by criterion [V], k3
        and tokens by lag [2, NUM_LAGS], and the sketch of the log-ratios of kept tokens, other tokens and sequences.
        maxes [M] float64: MISMATCH_MAXES.
        """
        context, table = self._context, self._table
        totals, maxes, sequences = self._tokens.joined()
        numbers = torch.stack([sequences.tokens, sequences.valid, sequences.kept]).sum(1)
        per_sequence = _per_sequence(sequences, context, corrected=correction is not None)
        counts = torch.stack([numbers[0], numbers[1], per_sequence[0], numbers[1]])
        counts[:3] *= float(correction is not None)
        counts[3] *= float(context.entropy is not None)
        effects = totals.new_zeros(len(EFFECTS), self._num_sequences)
        if correction is not None and correction.effects is not None:
            effects = correction.effects
        by_weight, rejected = effects[: len(EFFECTS)].sum(1), effects[len(EFFECTS) :]
        sums = [totals, numbers, by_weight, per_sequence, counts, rejected.sum(1), (rejected > 0).sum(1).double()]
        kind = torch.where(sequences.valid > 0, SEQUENCE_KIND, UNREAD_KIND).to(torch.int32)
        add_log_ratios(table, sequences.delta, kind=kind)
        by_lag = _by_lag(sequences, context.lags) if context.token_lags is None else self._by_token_lag.view(-1)
        return torch.cat([*sums, by_lag, flat_sketch(table)]), maxes


def _require_per_sequence(num_sequences: int, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != (num_sequences,):
            raise ValueError(f"{name} must be [N] = [{num_sequences}], got {list(tensor.shape)}: one per sequence.")


def _per_sequence(sums: SequenceSums, context: StepContext, *, corrected: bool) -> Tensor:
    """SEQUENCE_SUMS, float64."""
    delta, weight, tokens, valid, kept = sums.delta, sums.weight, sums.tokens, sums.valid, sums.kept
    seen, response = valid > 0, tokens > 0
    mean_delta, mean_rollout = delta / valid.clamp(min=1), sums.rollout / valid.clamp(min=1)
    ratio = bounded_exp(delta)
    mean_weight = weight / valid.clamp(min=1)
    invalid = valid < tokens
    over_seen = [
        seen,
        bounded_exp(-mean_rollout - mean_delta),
        bounded_exp(-mean_rollout),
        -mean_delta,
        mean_delta.abs(),
        bounded_exp(-mean_delta),
        ratio,
        ratio.square(),
        weight,
        mean_weight,
        mean_weight.square(),
    ]
    over_seen = [torch.where(seen, values.double(), 0.0) for values in over_seen]
    whole = response & (kept == tokens) if corrected else torch.zeros_like(response)
    touched = response & (kept < tokens) if corrected else torch.zeros_like(response)
    rewards = tokens.new_zeros(()) if context.rewards is None else context.rewards.double()
    rewarded = whole.double() * float(context.rewards is not None)
    over_responses = [
        whole,
        touched,
        torch.where(whole, tokens, 0.0),
        torch.where(touched, tokens, 0.0),
        rewarded,
        touched.double() * float(context.rewards is not None),
        torch.where(whole, rewards, 0.0),
        torch.where(touched, rewards, 0.0),
    ]
    columns = [over_seen[0], invalid.double(), *over_seen[1:], *(values.double() for values in over_responses)]
    return torch.stack(columns).sum(1)


def _by_lag(sequences: SequenceSums, lags: Tensor | None) -> Tensor:
    """k3 summed over tokens and the tokens, by lag -> [2 NUM_LAGS] float64."""
    sums = sequences.k3.new_zeros(2, NUM_LAGS)
    if lags is not None:
        columns = torch.stack([sequences.k3, sequences.valid])
        sums.scatter_add_(1, lags.clamp(0, NUM_LAGS - 1).expand_as(columns), columns)
    return sums.view(-1)
