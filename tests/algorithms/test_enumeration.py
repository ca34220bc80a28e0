"""Estimators by enumeration: every draw of N samples, every partition and every order of a batch, every gradient path.

The bias of one sample's gradient is in test_enumeration_bias.py, divergences are in test_enumeration_kl.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, permutations

import pytest
import torch
from algorithm_cases import MODES, Batch, backward, corrected, counts, random_batch, tokens_of
from enumeration_cases import (
    Case,
    corrected_case,
    expected_gradient,
    random_case,
    relative_error,
    score_coefficients,
)
from torch import Tensor

from algorithms.aggregate import token_coefficients
from algorithms.config import (
    Aggregation,
    CorrectionConfig,
    Level,
    MISConfig,
    PPOClipConfig,
    RecomputeConfig,
    RejectConfig,
    SelfNormalize,
    TISConfig,
    VanillaISConfig,
)
from algorithms.config.combine import resolved_loss
from algorithms.correction import Correction, correct, weight_total
from algorithms.loss import policy_loss
from algorithms.masked import segment_mean, segment_sum

# ---------------------------------------------------------------- self-normalised weights


@cache
def self_normalised_gradient(name: str, seed: int, num_samples: int) -> Tensor:
    """E of (mean of N responses' gradients) / Z over all draws of N responses of two tokens from mu, [prefixes, V].

    Z = sum / number of `weight_total`, added up over responses as it is over micro-batches. A draw without any
    weight is not divided.
    """
    case, config = random_case(seed, noise=0.5, length=2), NORMALISED[name]
    totals = totals_by_response(case, config)
    draws = torch.cartesian_prod(*[torch.arange(len(case.tokens))] * num_samples).view(-1, num_samples)
    weights, number = totals[draws].sum(1).unbind(1)
    normaliser = torch.where(number > 0, weights / number.clamp(min=1), 1.0)
    probability = case.mu()[draws].prod(1)
    scale = (probability / normaliser / num_samples).unsqueeze(1).expand_as(draws)
    # What a response contributes over all draws in which it takes part.
    per_response = torch.zeros(len(case.tokens), dtype=scale.dtype).index_add(0, draws.flatten(), scale.flatten())
    return case.ascent(per_response.unsqueeze(1) * score_coefficients(case, config))


def totals_by_response(case: Case, config: CorrectionConfig) -> Tensor:
    """`weight_total` of each response as a micro-batch of its own, [S, 2]."""
    whole = corrected_case(case, config)
    rows = []
    for index in range(len(case.tokens)):
        tokens = slice(index * case.length, (index + 1) * case.length)
        only = Correction(anchor=whole.anchor[tokens], weight=whole.weight[tokens], keep=whole.keep[tokens])
        rows.append(weight_total(config.spec(), only, cu_seqlens=torch.tensor([0, case.length], dtype=torch.int32)))
    return torch.stack(rows)


MEAN_ONE = SelfNormalize.mean_one
NORMALISED: dict[str, CorrectionConfig] = {
    **{f"vanilla-{level.name}": VanillaISConfig(level=level, self_normalize=MEAN_ONE) for level in Level},
    "tis-sequence": TISConfig(level=Level.sequence, cap=1.2, self_normalize=MEAN_ONE),
    "mis-token": MISConfig(low=0.7, high=1.3, self_normalize=MEAN_ONE, reject=RejectConfig()),
    "mis-geometric": MISConfig(
        level=Level.geometric, low=0.8, high=1.2, self_normalize=MEAN_ONE, reject=RejectConfig()
    ),
}


def limit(name: str, seed: int) -> Tensor:
    """The gradient for N -> infinity: E_mu[g] / (E_mu[sum of weights] / E_mu[their number])."""
    case, config = random_case(seed, noise=0.5, length=2), NORMALISED[name]
    weights, number = (case.mu().unsqueeze(1) * totals_by_response(case, config)).sum(0)
    return expected_gradient(case, config) * number / weights


@pytest.mark.parametrize("name", NORMALISED)
def test_the_bias_of_self_normalised_weights_falls_with_the_number_of_samples(name: str) -> None:
    for seed in range(3):
        errors = {n: relative_error(self_normalised_gradient(name, seed, n), limit(name, seed)) for n in (1, 2, 3, 5)}
        assert errors[1] > errors[2] > errors[3] > errors[5] > 0, errors
        # Of order 1 / N.
        assert 5 * errors[5] < 2 * errors[1] + 1e-3, errors


def test_self_normalised_sequence_weights_converge_to_the_true_gradient() -> None:
    for seed in range(3):
        case = random_case(seed, noise=0.5, length=2)
        assert relative_error(limit("vanilla-sequence", seed), case.true_gradient()) < 1e-12
        # A token's ratio is 1 on average too: Z removes variance and leaves the bias of the level.
        token = expected_gradient(case, VanillaISConfig())
        assert relative_error(limit("vanilla-token", seed), token) < 1e-12
        # A cap takes weight away; Z puts some of it back, and its bias becomes another one.
        weights, number = (case.mu().unsqueeze(1) * totals_by_response(case, NORMALISED["tis-sequence"])).sum(0)
        assert number.item() == pytest.approx(1) and weights.item() < 0.99


def test_one_self_normalised_response_has_weight_one() -> None:
    for name in ("vanilla-sequence", "vanilla-geometric", "tis-sequence"):
        plain = expected_gradient(random_case(0, noise=0.5, length=2), RecomputeConfig())
        assert relative_error(self_normalised_gradient(name, 0, 1), plain) < 1e-12


# ---------------------------------------------------------------- partitions and orders


def partitions(items: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Every way to divide the items into non-empty parts."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for with_first in combinations(rest, size):
            others = tuple(item for item in rest if item not in with_first)
            for parts in partitions(others):
                yield [(first, *with_first), *parts]


def four_responses() -> Batch:
    """The engines disagree about three responses and nearly agree about the last, which every mode keeps."""
    batch = random_batch(3, [5, 1, 4, 3], noise=0.6, dtype=torch.float64)
    gap = 1e-4 * torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    batch.response_mask[10:] = True
    batch.old_logprobs[10:] = torch.tensor([-0.7, -1.5, -0.2], dtype=torch.float64)
    batch.advantages[10:] = 1.0
    batch.rollout_logprobs[10:] = batch.old_logprobs[10:] - gap
    batch.logprobs[10:] = batch.old_logprobs[10:] + gap
    return batch


BATCH = four_responses()
SEQUENCES = (0, 1, 2, 3)
AGGREGATIONS = (Aggregation.token_mean, Aggregation.seq_mean_token_mean)


def step_counts(batch: Batch, config: CorrectionConfig) -> Tensor:
    """What ranks add up for an optimizer step: denominator, kept tokens and sequences, sum and number of weights."""
    correction = corrected(batch, config)
    kept = segment_sum(correction.keep.double(), batch.cu_seqlens)
    weights = weight_total(config.spec(), correction, cu_seqlens=batch.cu_seqlens)
    denominator = torch.tensor(counts(batch, config), dtype=torch.float64)
    return torch.cat([denominator, torch.stack([kept.sum(), (kept > 0).sum().double()]), weights])


@pytest.mark.parametrize("name", MODES)
def test_every_partition_into_micro_batches_and_shards_has_the_same_counts_and_gradient(name: str) -> None:
    config = MODES[name]
    whole = step_counts(BATCH, config)
    totals = counts(BATCH, config)
    loss_configs = [PPOClipConfig(aggregation=aggregation) for aggregation in AGGREGATIONS]
    gradients = [backward(BATCH, config, loss_config, totals=totals)[1] for loss_config in loss_configs]
    subsets = {part for parts in partitions(SEQUENCES) for part in parts}
    assert len(subsets) == 15
    counted = {part: step_counts(BATCH.select(list(part)), config) for part in subsets}
    ways = list(partitions(SEQUENCES))
    assert len(ways) == 15  # Bell number
    for parts in ways:
        added = torch.stack([counted[part] for part in parts]).sum(0)
        torch.testing.assert_close(added, whole, rtol=1e-12, atol=0)
    # A token's gradient in a part is that of the whole batch, so any sum over parts is.
    starts = [0, *BATCH.cu_seqlens[1:].tolist()]
    for loss_config, gradient in zip(loss_configs, gradients, strict=True):
        for part in subsets:
            _, partial = backward(BATCH.select(list(part)), config, loss_config, totals=totals)
            expected = torch.cat([gradient[starts[n] : starts[n + 1]] for n in part])
            torch.testing.assert_close(partial, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["recompute", "ppo_is", "tis-prefix", "mis-segment-mask", "miles_default"])
def test_every_order_of_the_sequences_has_the_same_loss(name: str) -> None:
    config = MODES[name]
    totals = counts(BATCH, config)
    whole, _ = backward(BATCH, config, PPOClipConfig(), totals=totals)
    for order in permutations(SEQUENCES):
        shuffled, _ = backward(BATCH.select(list(order)), config, PPOClipConfig(), totals=totals)
        torch.testing.assert_close(shuffled.loss, whole.loss, rtol=1e-12, atol=1e-15)


# ---------------------------------------------------------------- no gradient but that of log pi_theta


def loss_with(correction: Correction, logprobs: Tensor, config: CorrectionConfig, **tensors: Tensor) -> Tensor:
    """The policy loss of BATCH with this correction, with coefficient 1 or the tensors that are given."""
    arguments = {"advantages": BATCH.advantages, "coefficients": BATCH.response_mask.double(), **tensors}
    return policy_loss(
        logprobs,
        entropy=None,
        response_mask=BATCH.response_mask,
        cu_seqlens=BATCH.cu_seqlens,
        correction=correction,
        loss_config=resolved_loss(config, PPOClipConfig()),
        **arguments,
    ).loss


@pytest.mark.parametrize("name", MODES)
def test_nothing_but_log_pi_theta_gets_a_gradient(name: str) -> None:
    config = MODES[name]
    old, rollout, advantages, logprobs = (
        values.clone().requires_grad_()
        for values in (BATCH.old_logprobs, BATCH.rollout_logprobs, BATCH.advantages, BATCH.logprobs)
    )
    attached = replace(BATCH, old_logprobs=old, rollout_logprobs=rollout, advantages=advantages)
    correction = corrected(attached, config)
    for field, value in correction._asdict().items():
        assert not (isinstance(value, Tensor) and value.requires_grad), field
    # Whoever builds a Correction with a graph gets no gradient through it either.
    weight, anchor = correction.weight.clone().requires_grad_(), correction.anchor.clone().requires_grad_()
    coefficients = BATCH.response_mask.double().requires_grad_()
    loss_with(
        correction._replace(weight=weight, anchor=anchor),
        logprobs,
        config,
        advantages=advantages,
        coefficients=coefficients,
    ).backward()
    assert logprobs.grad is not None and (logprobs.grad != 0).any()
    for tensor in (old, rollout, advantages, weight, anchor, coefficients):
        assert tensor.grad is None or not tensor.grad.any()


@pytest.mark.parametrize("name", MODES)
def test_the_running_forward_may_be_compared_with_its_graph(name: str) -> None:
    # bypass compares log pi_theta itself; through the weight it would get a second, wrong gradient.
    config = MODES[name]

    def gradient(*, detach: bool) -> Tensor:
        logprobs = BATCH.logprobs.clone().requires_grad_()
        compared = logprobs.detach() if detach else logprobs
        loss_with(corrected(replace(BATCH, old_logprobs=compared), config), logprobs, config).backward()
        assert logprobs.grad is not None
        return logprobs.grad

    assert torch.equal(gradient(detach=False), gradient(detach=True)) and gradient(detach=True).any()


# ---------------------------------------------------------------- the denominator of rejected tokens


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_kept_tokens_are_divided_by_all_tokens_unless_they_are_to_be_dropped(aggregation: Aggregation) -> None:
    config = MISConfig(low=0.7, high=1.4, reject=RejectConfig())
    keep = corrected(BATCH, config).keep
    assert 0 < keep.sum() < BATCH.response_mask.sum()
    mask = BATCH.response_mask
    coefficients = token_coefficients(
        aggregation,
        mask=mask,
        cu_seqlens=BATCH.cu_seqlens,
        num_tokens=mask.sum(),
        num_sequences=(segment_sum(mask.double(), BATCH.cu_seqlens) > 0).sum(),
        fixed_length_tokens=None,
    )
    assert coefficients.sum().item() == pytest.approx(1, rel=1e-6)
    kept_share = (coefficients * keep).sum().item()
    by_hand = {
        Aggregation.token_mean: (keep.sum() / mask.sum()).item(),
        Aggregation.seq_mean_token_mean: segment_mean(keep.double(), mask, BATCH.cu_seqlens).sum().item()
        / int((segment_sum(mask.double(), BATCH.cu_seqlens) > 0).sum()),
    }
    assert kept_share == pytest.approx(by_hand[aggregation], rel=1e-6) and kept_share < 1
    _, gradient = backward(BATCH, config, PPOClipConfig(aggregation=aggregation), totals=counts(BATCH, config))
    _, everything = backward(
        BATCH, VanillaISConfig(), PPOClipConfig(aggregation=aggregation), totals=counts(BATCH, config)
    )
    torch.testing.assert_close(gradient, torch.where(keep, everything, 0.0), rtol=1e-12, atol=0)


def test_correct_is_a_function_of_its_response_alone() -> None:
    # The weight of a response does not know the others, in every mode; weight_total does the rest.
    for config in MODES.values():
        whole = corrected(BATCH, config)
        starts = BATCH.cu_seqlens.tolist()
        for n in SEQUENCES:
            alone = BATCH.select([n])
            one = correct(
                config.spec(),
                tokens_of(alone, alone.advantages),
            )
            torch.testing.assert_close(one.weight, whole.weight[starts[n] : starts[n + 1]], rtol=1e-12, atol=0)
            assert torch.equal(one.keep, whole.keep[starts[n] : starts[n + 1]])
