"""Log-probs, the correction and its context -> the sums of all mismatch metrics, without reading a value.

`algorithms.token_sums` passes over the tokens once and leaves one row of sums per block of 64 tokens. Here blocks add
up to sequences, and blocks that hold the border of two sequences are taken apart. `algorithms.mismatch_report` turns
the sums into metrics.

T: packed tokens, N: sequences, B: blocks, V: rejection criteria, R: rows, what is summed per sequence.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from algorithms.correction import Correction
from algorithms.kl import bounded_exp
from algorithms.masked import require_packed
from algorithms.sketch import SEQUENCE_KIND, UNREAD_KIND, add_log_ratios, flat_sketch, new_table
from algorithms.token_sums import BLOCK, FLAGS, TOKEN_SUMS, Measured, Tokens, measure, pass_over

DIRECT_TOKENS: Final = 2**16
"""Tokens that are summed one by one at a time, a multiple of BLOCK: bounds the memory for it."""
NUM_LAGS: Final = 8
"""Buckets of the weight lag 0, 1, ..., the last one for all larger lags."""

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
"""FLAGS and sequences, of the micro-batches that had a correction or an entropy only."""
SCALARS: Final = (*TOKEN_SUMS, *FLAGS, *SEQUENCE_SUMS, *COUNTS)


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


def mismatch_sums(
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    correction: Correction | None,
    context: StepContext,
) -> tuple[Tensor, Tensor]:
    """(sums, maxes) of one micro-batch on its device; arguments as in `algorithms.diagnostics.mismatch_stats`.

    sums [K] float64: SCALARS, tokens by criterion [V], sequences by criterion [V], k3 and tokens by lag
    [2, NUM_LAGS], and the sketch of the log-ratios of kept tokens, other tokens and sequences. maxes [M] float64:
    MISMATCH_MAXES.
    """
    per_token = {"advantages": context.advantages, "entropy": context.entropy}
    require_packed(
        response_mask,
        old_logprobs=old_logprobs,
        rollout_logprobs=rollout_logprobs,
        **{name: tensor for name, tensor in per_token.items() if tensor is not None},
    )
    _require_per_sequence(cu_seqlens.numel() - 1, rewards=context.rewards, lags=context.lags)
    with_k3 = context.lags is not None
    with torch.no_grad():
        tokens = Tokens(
            old_logprobs=old_logprobs.detach(),
            rollout_logprobs=rollout_logprobs.detach(),
            response_mask=response_mask,
            keep=None if correction is None else correction.keep,
            weight=None if correction is None else correction.weight,
            raw_weight=None if correction is None else correction.raw_weight,
            clipped=None if correction is None else correction.clipped,
            raised=None if correction is None else correction.raised,
            advantages=context.advantages,
            entropy=context.entropy,
            verdicts=() if correction is None else tuple(verdict.keep for verdict in correction.verdicts),
        )
        table = new_table(response_mask.device)
        totals, maxes, blocks = pass_over(tokens, table, with_k3=with_k3)
        flags = blocks[3 + with_k3 :].sum(1)
        sequences = _sequences(tokens, blocks, cu_seqlens, with_k3=with_k3)
        per_sequence, by_criterion = _per_sequence(sequences[:3], sequences[3 + with_k3 :], context, tokens.keep)
        counts = torch.stack([flags[0], flags[1], per_sequence[0], flags[1]])
        counts[:3] *= float(correction is not None)
        counts[3] *= float(context.entropy is not None)
        sums = [totals, flags[: len(FLAGS)], per_sequence, counts, flags[len(FLAGS) :], by_criterion]
        _sketch_sequences(table, sequences[0], valid=sequences[3 + with_k3 + 1])
        return torch.cat([*sums, _by_lag(sequences, context.lags), flat_sketch(table)]), maxes


def _require_per_sequence(num_sequences: int, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != (num_sequences,):
            raise ValueError(f"{name} must be [N] = [{num_sequences}], got {list(tensor.shape)}: one per sequence.")


def _sequences(tokens: Tokens, blocks: Tensor, cu_seqlens: Tensor, *, with_k3: bool) -> Tensor:
    """Sums per block [R, B] -> sums per sequence [R, N] float64. Blocks with a border are measured again by token."""
    num_tokens, num_sequences = tokens.response_mask.shape[0], cu_seqlens.numel() - 1
    # One slot more than sequences takes what belongs to none.
    sums = blocks.new_zeros(blocks.shape[0], num_sequences + 1)
    if num_tokens == 0:
        return sums[:, :num_sequences]
    ends = cu_seqlens[1:].long()
    if num_sequences * BLOCK > num_tokens:
        # Short sequences: most blocks hold a border, so every token is taken by itself.
        for start in range(0, num_tokens, DIRECT_TOKENS):
            part = tokens.cut(start, min(start + DIRECT_TOKENS, num_tokens))
            places = torch.arange(start, start + part.response_mask.shape[0], device=blocks.device)
            owner = torch.searchsorted(ends, places, right=True)
            _add_tokens(sums, measure(part, with_k3=with_k3), owner)
        return sums[:, :num_sequences]
    borders = torch.div(cu_seqlens.long(), BLOCK, rounding_mode="floor").clamp_(max=blocks.shape[1] - 1)
    starts = torch.arange(0, num_tokens, BLOCK, device=blocks.device)
    owner = torch.searchsorted(ends, starts, right=True).index_fill_(0, borders, num_sequences)
    sums.scatter_add_(1, owner.expand_as(blocks), blocks)

    offsets = torch.arange(BLOCK, device=blocks.device)
    positions = borders.unsqueeze(1) * BLOCK + offsets
    # Two borders in one block: its tokens count once.
    repeated = torch.cat([torch.zeros_like(borders[:1], dtype=torch.bool), borders[1:] == borders[:-1]])
    outside = ((positions >= num_tokens) | repeated.unsqueeze(1)).view(-1)
    index = positions.view(-1).clamp_(max=num_tokens - 1)
    owner = torch.searchsorted(ends, index, right=True).masked_fill_(outside, num_sequences)
    _add_tokens(sums, measure(tokens.each(lambda tensor: tensor.index_select(0, index)), with_k3=with_k3), owner)
    return sums[:, :num_sequences]


def _add_tokens(sums: Tensor, measured: Measured, owner: Tensor) -> None:
    """Add measured tokens [n] to the sums [R, N + 1] of their sequences; owner [n] int64."""
    columns = torch.cat([torch.stack(measured.rows), measured.flags.double()])
    sums.scatter_add_(1, owner.expand_as(columns), columns)


def _per_sequence(rows: Tensor, flags: Tensor, context: StepContext, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """SEQUENCE_SUMS, and the responses that each criterion touches [V]; float64."""
    delta, rollout, weight = rows
    tokens, valid, kept = flags[:3]
    seen, response = valid > 0, tokens > 0
    mean_delta, mean_rollout = delta / valid.clamp(min=1), rollout / valid.clamp(min=1)
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
    whole = response & (kept == tokens) if keep is not None else torch.zeros_like(response)
    touched = response & (kept < tokens) if keep is not None else torch.zeros_like(response)
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
    return torch.stack(columns).sum(1), (flags[len(FLAGS) :] > 0).sum(1).double()


def _by_lag(sequences: Tensor, lags: Tensor | None) -> Tensor:
    """k3 summed over tokens and the tokens, by lag -> [2 NUM_LAGS] float64."""
    sums = sequences.new_zeros(2, NUM_LAGS)
    if lags is not None:
        # Row 3 is k3; the flags begin behind it, and valid tokens are the second.
        columns = torch.stack([sequences[3], sequences[5]])
        sums.scatter_add_(1, lags.clamp(0, NUM_LAGS - 1).expand_as(columns), columns)
    return sums.view(-1)


def _sketch_sequences(table: Tensor, delta: Tensor, *, valid: Tensor) -> None:
    """Count the log-ratios of the sequences [N]; those without a valid token land where nobody reads."""
    add_log_ratios(table, delta, kind=torch.where(valid > 0, SEQUENCE_KIND, UNREAD_KIND).to(torch.int32))
