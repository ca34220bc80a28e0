"""Coefficients of every aggregation against numbers worked by hand."""

import pytest
import torch
from algorithm_cases import packed

from algorithms.aggregate import token_coefficients
from algorithms.config import Aggregation

# Three sequences of 3, 2 and 2 tokens; 2, 1 and 0 of them are responses. The whole step has 10 tokens, 4 sequences.
MASK = torch.tensor([False, True, True, True, False, False, False])
CU_SEQLENS = packed(3, 2, 2)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (Aggregation.token_mean, [0, 0.1, 0.1, 0.1, 0, 0, 0]),
        (Aggregation.seq_mean_token_mean, [0, 0.125, 0.125, 0.25, 0, 0, 0]),
        (Aggregation.seq_mean_token_sum, [0, 0.25, 0.25, 0.25, 0, 0, 0]),
        (Aggregation.fixed_length, [0, 0.0125, 0.0125, 0.0125, 0, 0, 0]),
        (Aggregation.token_sum, [0, 1, 1, 1, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("on_device", [False, True])
def test_closed_form(aggregation: Aggregation, expected: list[float], on_device: bool) -> None:
    coefficients = token_coefficients(
        aggregation,
        mask=MASK,
        cu_seqlens=CU_SEQLENS,
        num_tokens=torch.tensor(10, dtype=torch.float64) if on_device else 10,
        num_sequences=torch.tensor(4) if on_device else 4,
        fixed_length_tokens=20 if aggregation is Aggregation.fixed_length else None,
    )
    assert coefficients.dtype == torch.float32
    torch.testing.assert_close(coefficients, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("aggregation", Aggregation)
def test_empty_sequences_and_padding_change_nothing(aggregation: Aggregation) -> None:
    def coefficients(mask: torch.Tensor, *lengths: int) -> torch.Tensor:
        return token_coefficients(
            aggregation,
            mask=mask,
            cu_seqlens=packed(*lengths),
            num_tokens=10,
            num_sequences=4,
            fixed_length_tokens=20,
        )

    expected = coefficients(MASK, 3, 2, 2)
    assert torch.equal(coefficients(MASK, 0, 3, 0, 0, 2, 2, 0), expected)
    # The last sequence has no response token; here its tokens are padding that belongs to no sequence.
    assert torch.equal(coefficients(MASK, 3, 2), expected)


@pytest.mark.parametrize(
    ("aggregation", "total"),
    [
        (Aggregation.token_mean, 1.0),
        (Aggregation.seq_mean_token_mean, 1.0),
        (Aggregation.seq_mean_token_sum, 1.5),
        (Aggregation.fixed_length, 0.15),
        (Aggregation.token_sum, 3.0),
    ],
)
def test_a_loss_of_one_per_token_aggregates_to_its_mean(aggregation: Aggregation, total: float) -> None:
    # 3 response tokens in 2 sequences that have any: mean 1, mean of means 1, mean of sums 3/2, mean of sums/10.
    coefficients = token_coefficients(
        aggregation, mask=MASK, cu_seqlens=CU_SEQLENS, num_tokens=3, num_sequences=2, fixed_length_tokens=10
    )
    assert coefficients.sum().item() == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("aggregation", Aggregation)
def test_a_sequence_has_the_same_coefficients_in_every_micro_batch(aggregation: Aggregation) -> None:
    def coefficients(mask: torch.Tensor, *lengths: int) -> torch.Tensor:
        return token_coefficients(
            aggregation, mask=mask, cu_seqlens=packed(*lengths), num_tokens=3, num_sequences=2, fixed_length_tokens=7
        )

    whole = coefficients(MASK, 3, 2, 2)
    parts = [coefficients(MASK[:3], 3), coefficients(MASK[3:5], 2), coefficients(MASK[5:], 2)]
    assert torch.equal(torch.cat(parts), whole)
    reordered = coefficients(torch.cat([MASK[3:], MASK[:3]]), 2, 2, 3)
    assert torch.equal(torch.cat([reordered[4:], reordered[:4]]), whole)


@pytest.mark.parametrize("aggregation", Aggregation)
def test_nothing_in_the_denominator_gives_zeros(aggregation: Aggregation) -> None:
    coefficients = token_coefficients(
        aggregation,
        mask=torch.zeros(3, dtype=torch.bool),
        cu_seqlens=packed(2, 0, 1),
        num_tokens=0,
        num_sequences=torch.tensor(0),
        fixed_length_tokens=8,
    )
    assert coefficients.tolist() == [0, 0, 0]


def test_fixed_length_needs_its_length() -> None:
    with pytest.raises(ValueError, match="fixed_length_tokens must be > 0"):
        token_coefficients(
            Aggregation.fixed_length,
            mask=MASK,
            cu_seqlens=CU_SEQLENS,
            num_tokens=1,
            num_sequences=1,
            fixed_length_tokens=None,
        )
