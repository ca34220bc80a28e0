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
