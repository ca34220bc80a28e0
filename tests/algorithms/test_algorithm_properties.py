"""Properties of the whole chain correction -> coefficients -> loss, over all modes and aggregations.

Every sum is compared with 1e-6 of the sum of its absolute parts: relative to a total in which parts cancel, no
float32 sum is accurate.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithm_cases import MODES, Batch, backward, corrected, counts, packed, random_batch, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algorithms.advantage import ADVANTAGES, sample_advantages
from algorithms.aggregate import token_coefficients
from algorithms.config import (
    Aggregation,
    Anchor,
    CISPOConfig,
    CorrectionConfig,
    DPPOKLConfig,
    DPPOTVConfig,
    GSPOConfig,
    LossConfig,
    MISConfig,
    PPOClipConfig,
    ReinforceConfig,
    RejectedDenominator,
    SAPOConfig,
)
from algorithms.correction import correct
from algorithms.kl import k3
from algorithms.loss import policy_loss
from algorithms.mismatch import mismatch_stats
from algorithms.tokens import Tokens

SEEDS = st.integers(0, 2**31)
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=6)
NOISES = st.sampled_from([0.01, 0.3, 3.0])
MODE_NAMES = st.sampled_from(sorted(MODES))
LOSSES = st.builds(
    lambda surrogate, aggregation: replace(
        surrogate,
        aggregation=aggregation,
        fixed_length_tokens=16 if aggregation is Aggregation.fixed_length else None,
        entropy_coef=0.01,
    ),
    st.sampled_from(
        [
            PPOClipConfig(clip_high=0.28, dual_clip=3.0),
            GSPOConfig(),
            CISPOConfig(high=2.0),
            ReinforceConfig(),
            DPPOTVConfig(threshold=0.1),
            DPPOKLConfig(),
            SAPOConfig(),
        ]
    ),
    st.sampled_from(Aggregation),
)


def parts_size(batch: Batch, config: CorrectionConfig, loss_config: LossConfig, totals: tuple[int, int]) -> float:
    """Sum over sequences of |loss of that sequence alone|."""
    sequences = range(len(batch.lengths))
    return sum(abs(backward(batch.select([n]), config, loss_config, totals=totals)[0].loss.item()) for n in sequences)


def assert_gradients_agree(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


@settings(max_examples=30)
@given(seed=SEEDS, lengths=LENGTHS, noise=NOISES, name=MODE_NAMES, loss_config=LOSSES, cut=st.integers(0, 6))
def test_micro_batches_add_up(
    seed: int, lengths: list[int], noise: float, name: str, loss_config: LossConfig, cut: int
) -> None:
    batch, config = random_batch(seed, lengths, noise=noise), MODES[name]
    totals = counts(batch, config)
    whole, gradient = backward(batch, config, loss_config, totals=totals)
    sequences = list(range(len(lengths)))
    parts = [
        backward(batch.select(half), config, loss_config, totals=totals) for half in (sequences[:cut], sequences[cut:])
    ]
    loss = sum(part.loss.item() for part, _ in parts)
    scale = parts_size(batch, config, loss_config, totals)
    assert abs(loss - whole.loss.item()) <= 1e-6 * scale
    assert_gradients_agree(torch.cat([grad for _, grad in parts]), gradient)
    merged = parts[0][0].stats.merge(parts[1][0].stats)
    torch.testing.assert_close(merged.sums, whole.stats.sums, rtol=1e-6, atol=1e-6 * scale)
    assert torch.equal(merged.maxes, whole.stats.maxes)


@settings(max_examples=30)
@given(seed=SEEDS, lengths=LENGTHS, noise=NOISES, name=MODE_NAMES, loss_config=LOSSES, data=st.data())
def test_the_order_of_sequences_does_not_matter(
    seed: int, lengths: list[int], noise: float, name: str, loss_config: LossConfig, data: st.DataObject
) -> None:
    batch, config = random_batch(seed, lengths, noise=noise), MODES[name]
    totals = counts(batch, config)
    order = data.draw(st.permutations(range(len(lengths))))
    whole, gradient = backward(batch, config, loss_config, totals=totals)
    shuffled, shuffled_gradient = backward(batch.select(order), config, loss_config, totals=totals)
    scale = parts_size(batch, config, loss_config, totals)
    assert abs(shuffled.loss.item() - whole.loss.item()) <= 1e-6 * scale
    pieces = gradient.split(lengths)
    assert_gradients_agree(shuffled_gradient, torch.cat([pieces[n] for n in order]))


def pad(batch: Batch, *, inside: int, behind: int) -> tuple[Batch, Tensor]:
    """Masked garbage in front of every sequence and behind the last; also the positions of the real tokens."""
    num_tokens = sum(batch.lengths) + inside * len(batch.lengths) + behind
    starts, position = [], 0
    for length in batch.lengths:
        starts.append(torch.arange(position + inside, position + inside + length))
        position += inside + length
    real = torch.cat(starts)

    def garbage(values: Tensor, filler: float) -> Tensor:
        out = torch.full((num_tokens,), filler)
        out[real] = values
        return out

    mask = torch.zeros(num_tokens, dtype=torch.bool)
    mask[real] = batch.response_mask
    padded = Batch(
        logprobs=garbage(batch.logprobs, math.nan),
        old_logprobs=garbage(batch.old_logprobs, -math.inf),
        rollout_logprobs=garbage(batch.rollout_logprobs, math.inf),
        advantages=garbage(batch.advantages, math.nan),
        entropy=garbage(batch.entropy, math.nan),
        response_mask=mask,
        cu_seqlens=packed(*[inside + length for length in batch.lengths]),
    )
    return padded, real


@settings(max_examples=30)
@given(
    seed=SEEDS,
    lengths=LENGTHS,
    noise=NOISES,
    name=MODE_NAMES,
    loss_config=LOSSES,
    inside=st.integers(0, 3),
    behind=st.integers(0, 3),
)
def test_prompts_and_padding_do_not_matter(
    seed: int, lengths: list[int], noise: float, name: str, loss_config: LossConfig, inside: int, behind: int
) -> None:
    batch, config = random_batch(seed, lengths, noise=noise), MODES[name]
    totals = counts(batch, config)
    whole, gradient = backward(batch, config, loss_config, totals=totals)
    padded, real = pad(batch, inside=inside, behind=behind)
    output, padded_gradient = backward(padded, config, loss_config, totals=totals)
    scale = parts_size(batch, config, loss_config, totals)
    assert abs(output.loss.item() - whole.loss.item()) <= 1e-6 * scale
    assert_gradients_agree(padded_gradient[real], gradient)
    is_real = torch.zeros(len(padded_gradient), dtype=torch.bool)
    is_real[real] = True
    assert (padded_gradient[~is_real] == 0).all()


@settings(max_examples=15)
@given(seed=SEEDS, lengths=LENGTHS, loss_config=LOSSES)
def test_all_modes_coincide_bit_for_bit_when_the_engines_agree(
    seed: int, lengths: list[int], loss_config: LossConfig
) -> None:
    batch = random_batch(seed, lengths, noise=0.0)
    assert torch.equal(batch.old_logprobs, batch.rollout_logprobs)
    reference = corrected(batch, MODES["recompute"])
    totals = counts(batch, MODES["recompute"])
    loss, gradient = backward(batch, MODES["recompute"], loss_config, totals=totals)
    for name, config in MODES.items():
        correction = corrected(batch, config)
        assert torch.equal(correction.anchor, reference.anchor), name
        assert torch.equal(correction.weight, torch.ones_like(correction.weight)), name
        assert torch.equal(correction.keep, batch.response_mask), name
        if config.spec().anchor is not Anchor.none:
            output, grad = backward(batch, config, loss_config, totals=totals)
            assert torch.equal(output.loss, loss.loss) and torch.equal(grad, gradient), name


@settings(max_examples=15)
@given(seed=SEEDS, lengths=LENGTHS, noise=NOISES)
def test_k3_is_non_negative_and_the_same_in_every_mode(seed: int, lengths: list[int], noise: float) -> None:
    batch = random_batch(seed, lengths, noise=noise)
    delta = batch.old_logprobs - batch.rollout_logprobs
    assert (k3(delta) >= 0).all() and (k3(delta[delta != 0]) > 0).all()
    tokens = tokens_of(batch)
    seen = {mismatch_stats(tokens, corrected(batch, c)).metrics()["mismatch/k3"] for c in MODES.values()}
    assert len(seen) == 1
    assert all((value is None) == (not batch.response_mask.any()) for value in seen)


@settings(max_examples=15)
@given(seed=SEEDS, lengths=LENGTHS, noise=NOISES, name=MODE_NAMES)
def test_fields_are_consistent(seed: int, lengths: list[int], noise: float, name: str) -> None:
    batch = random_batch(seed, lengths, noise=noise)
    correction = corrected(batch, MODES[name])
    assert not (correction.keep & ~batch.response_mask).any()
    assert torch.isfinite(correction.weight).all() and torch.isfinite(correction.anchor).all()
    assert (correction.weight[batch.response_mask & ~correction.keep] == 0).all()
    assert (correction.weight[correction.keep] > 0).all()
    metrics = mismatch_stats(
        tokens_of(batch),
        correction,
    ).metrics()
    for metric in ("mismatch/ess/raw_token", "mismatch/ess/applied_token"):
        ess = metrics[metric]
        assert ess is None or 0 < ess <= 1 + 1e-12


@pytest.mark.parametrize("drop", RejectedDenominator)
def test_rejection_shrinks_or_keeps_the_scale(drop: RejectedDenominator) -> None:
    # Ten identical tokens with A = 1 and ratio 1; four of them far outside the bounds.
    delta = torch.tensor([0.0] * 6 + [3.0] * 4)
    batch = random_batch(0, [10], noise=0.0)
    batch.rollout_logprobs = torch.full((10,), -4.0)
    batch.old_logprobs = batch.logprobs = batch.rollout_logprobs + delta
    batch.advantages = torch.ones(10)
    batch.response_mask = torch.ones(10, dtype=torch.bool)
    config = MISConfig(rejected_denominator=drop)
    output, _ = backward(batch, config, PPOClipConfig(), totals=counts(batch, config))
    assert output.loss.item() == pytest.approx(-1.0 if drop is RejectedDenominator.drop else -0.6, abs=1e-6)


@pytest.mark.parametrize("name", MODES)
def test_no_value_is_read_on_the_host(name: str) -> None:
    # Meta tensors have no values: item(), branching on one and data-dependent shapes raise.
    with torch.device("meta"):
        logprobs = torch.empty(9, requires_grad=True)
        old, rollout, advantages, entropy = (torch.empty(9) for _ in range(4))
        mask = torch.empty(9, dtype=torch.bool)
        cu_seqlens = torch.empty(4, dtype=torch.int32)
        count = torch.empty(())
        rewards, groups = torch.empty(6), torch.empty(6, dtype=torch.long)
    with pytest.raises(RuntimeError):
        _ = count.item()
    layout = {"response_mask": mask, "cu_seqlens": cu_seqlens}
    correction = correct(
        MODES[name].spec(), Tokens(trainer_logprobs=old, rollout_logprobs=rollout, advantages=advantages, **layout)
    )
    by_aggregation = [
        token_coefficients(
            aggregation,
            mask=mask & correction.keep,
            cu_seqlens=cu_seqlens,
            num_tokens=count,
            num_sequences=count,
            fixed_length_tokens=16,
        )
        for aggregation in Aggregation
    ]
    output = policy_loss(
        logprobs,
        entropy=entropy,
        advantages=advantages,
        response_mask=mask,
        cu_seqlens=cu_seqlens,
        correction=correction,
        coefficients=sum(by_aggregation[1:], by_aggregation[0]),
        loss_config=PPOClipConfig(entropy_coef=0.1, dual_clip=3.0),
    )
    output.loss.backward()
    stats = mismatch_stats(Tokens(trainer_logprobs=old, rollout_logprobs=rollout, **layout), correction)
    merged = (stats.merge(stats), output.stats.merge(output.stats))
    advantages_of = [sample_advantages(each, rewards, groups, epsilon=1e-6, num_tokens=groups) for each in ADVANTAGES]
    assert all(tensor.is_meta for tensor in (*advantages_of, *(part.sums for part in merged)))
