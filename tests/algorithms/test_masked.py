"""Masked and segmented reductions against numbers worked by hand."""

import math

import pytest
import torch
from algorithm_cases import packed

from algorithms.masked import (
    divide_by_count,
    masked_sum,
    require_packed,
    segment_expand,
    segment_mean,
    segment_min,
    segment_sum,
)

NAN = math.nan


def test_masked_sum_ignores_what_is_off_the_mask() -> None:
    values = torch.tensor([1.0, NAN, 4.0, math.inf])
    mask = torch.tensor([True, False, True, False])
    assert masked_sum(values, mask).item() == 5.0


def test_an_empty_mask_gives_zero_and_a_zero_gradient() -> None:
    values = torch.tensor([1.0, NAN], requires_grad=True)
    total = masked_sum(values, torch.tensor([False, False]))
    assert total.item() == 0.0
    total.backward()
    assert values.grad is not None and values.grad.tolist() == [0.0, 0.0]
    assert masked_sum(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).item() == 0.0


def test_segments_with_empty_ones_at_the_front_in_the_middle_and_at_the_end() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    cu_seqlens = packed(0, 2, 0, 0, 3, 0)
    assert segment_sum(values, cu_seqlens).tolist() == [0, 3, 0, 0, 12, 0]
    assert segment_min(values, cu_seqlens).tolist() == [math.inf, 1, math.inf, math.inf, 3, math.inf]
    spread = segment_expand(torch.tensor([9.0, 1.0, 9.0, 9.0, 2.0, 9.0]), cu_seqlens, num_tokens=5)
    assert spread.tolist() == [1, 1, 2, 2, 2]
    mask = torch.tensor([True, False, False, True, True])
    assert segment_mean(values, mask, cu_seqlens).tolist() == [0, 1, 0, 0, 4.5, 0]


def test_padding_behind_the_last_sequence_belongs_to_none() -> None:
    values = torch.tensor([1.0, 2.0, 100.0, -100.0])
    cu_seqlens = packed(1, 1)
    assert segment_sum(values, cu_seqlens).tolist() == [1, 2]
    assert segment_min(values, cu_seqlens).tolist() == [1, 2]
    assert segment_expand(torch.tensor([5.0, 6.0]), cu_seqlens, num_tokens=4).tolist() == [5, 6, 0, 0]
    assert segment_expand(torch.tensor([True, True]), cu_seqlens, num_tokens=4).tolist() == [True, True, False, False]


def test_nothing_packed_at_all() -> None:
    empty = torch.zeros(0)
    assert segment_sum(empty, packed()).tolist() == []
    assert segment_min(empty, packed()).tolist() == []
    assert segment_expand(empty, packed(), num_tokens=0).tolist() == []
    assert segment_sum(empty, packed(0, 0)).tolist() == [0, 0]


def test_segment_sum_does_not_lose_small_addends() -> None:
    # 1e8 + 1 - 1e8 is 0 in float32, whatever the order of a float32 accumulator.
    values = torch.tensor([1e8, 1.0, -1e8])
    assert segment_sum(values, packed(3)).tolist() == [1.0]
    assert segment_sum(values, packed(3)).dtype == torch.float32


def test_segment_sum_is_differentiable() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (segment_sum(values, packed(2, 1)) * torch.tensor([10.0, 20.0])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [10, 10, 20]


def test_divide_by_count_takes_zero_as_one() -> None:
    assert divide_by_count(torch.tensor(6.0), 4).item() == 1.5
    assert divide_by_count(torch.tensor(6.0), 0).item() == 6.0
    assert divide_by_count(torch.tensor([6.0, 6.0]), torch.tensor([0, 3])).tolist() == [6.0, 2.0]


def test_require_packed_names_the_tensor_and_the_rule() -> None:
    mask = torch.tensor([True, False])
    require_packed(mask, logprobs=torch.zeros(2), advantages=torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"advantages must have the shape of response_mask \[2\], got \[3\]"):
        require_packed(mask, advantages=torch.zeros(3))
    with pytest.raises(ValueError, match=r"logprobs must be float32, got torch\.bfloat16"):
        require_packed(mask, logprobs=torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="response_mask must be"):
        require_packed(torch.ones(2), logprobs=torch.zeros(2))
    with pytest.raises(ValueError, match="response_mask must be"):
        require_packed(torch.ones(1, 2, dtype=torch.bool), logprobs=torch.zeros(1, 2))
