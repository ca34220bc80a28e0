"""Sums over sequences by blocks: against sequence by sequence, at every kind of border."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.segments import BLOCK, Segments

LENGTHS = st.lists(st.sampled_from([0, 0, 1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 700]), max_size=8)


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, padding=st.sampled_from([0, 1, 50, BLOCK, 3 * BLOCK]), seed=st.integers(0, 2**31))
def test_sums_counts_and_the_way_back(lengths: list[int], padding: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths) + padding
    values = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    flags = values > 0.5
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    segments = Segments(cu_seqlens, num_tokens=num_tokens)
    parts = torch.split(values, [*lengths, padding])[:-1]
    torch.testing.assert_close(segments.sum(values).tolist(), [part.sum().item() for part in parts])
    assert segments.count(flags).tolist() == [(part > 0.5).sum().item() for part in parts]
    per_sequence = torch.arange(1, len(lengths) + 1, dtype=torch.float32)
    expected = torch.cat(
        [per_sequence.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)), torch.zeros(padding)]
    )
    assert torch.equal(segments.expand(per_sequence), expected)


def test_no_value_is_read_on_the_host() -> None:
    with torch.device("meta"):
        for num_tokens in (9, 900):
            segments = Segments(torch.empty(4, dtype=torch.int32), num_tokens=num_tokens)
            assert segments.sum(torch.empty(num_tokens, dtype=torch.float64)).shape == (3,)
            assert segments.count(torch.empty(num_tokens, dtype=torch.bool)).shape == (3,)
            assert segments.expand(torch.empty(3)).shape == (num_tokens,)
