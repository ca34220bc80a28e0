"""Floors worked by hand: FLOPs, bytes, the replay of lengths, and that no schedule beats its own limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.limits.floors import (
    GroupLengths,
    Lengths,
    Rates,
    kv_bytes_per_token,
    optimizer_floor,
    prefill_floor,
    replay_decode,
    sequence_flops,
    sync_floor,
    training_flops,
)
from trainer.limits.model_shape import ModelShape

TINY = ModelShape(
    num_parameters=1000,
    layer_parameters=300,
    num_layers=2,
    vocab_size=20,
    hidden_size=10,
    attention_size=8,
    head_size=4,
    kv_size=4,
    is_tied=False,
    idle_parameters=0,
    num_experts=0,
    experts_per_token=0,
)
"""Body 600, head 200, embedding 200."""
QWEN_0_5B = ModelShape(
    num_parameters=494_032_768,
    layer_parameters=14_912_384,
    num_layers=24,
    vocab_size=151_936,
    hidden_size=896,
    attention_size=896,
    head_size=64,
    kv_size=256,
    is_tied=True,
    idle_parameters=0,
    num_experts=0,
    experts_per_token=0,
)
QWEN_7B = ModelShape(
    num_parameters=7_615_616_512,
    layer_parameters=233_057_792,
    num_layers=28,
    vocab_size=152_064,
    hidden_size=3584,
    attention_size=3584,
    head_size=128,
    kv_size=1024,
    is_tied=False,
    idle_parameters=0,
    num_experts=0,
    experts_per_token=0,
)
H200 = Rates(flops=790e12, bytes_per_s=4.3e12)
ONE = Rates(flops=1.0, bytes_per_s=1.0)


def test_parameters_by_hand() -> None:
    assert (TINY.body_parameters, TINY.head_parameters, TINY.matrix_parameters) == (600, 200, 800)
    # A tied embedding is the head and counts once.
    assert QWEN_0_5B.matrix_parameters == QWEN_0_5B.num_parameters
    assert QWEN_7B.matrix_parameters == QWEN_7B.num_parameters - 152_064 * 3584


def test_forward_and_training_by_hand() -> None:
    groups = [GroupLengths(3, (2,), 2), GroupLengths(1, (4,), 4)]
    # 10 tokens meet the body, 6 the head; two sequences of 5 tokens in 2 layers of width 8.
    forward = 2 * 600 * 10 + 2 * 200 * 6 + 2 * 2 * 8 * (25 + 25)
    assert sequence_flops(TINY, groups) == forward
    assert training_flops(TINY, groups) == 3 * forward
    assert training_flops(TINY, groups, full_recompute=True) == 4 * forward


def test_a_shared_prompt_is_counted_once() -> None:
    # Sequences of 5 and 7 tokens with the same 3: 9 tokens, of which 5 were sampled; 9 + (25 - 9) + (49 - 9) cells.
    shared = sequence_flops(TINY, [GroupLengths(3, (2, 4), 5)])
    assert shared == 2 * 600 * 9 + 2 * 200 * 5 + 2 * 2 * 8 * (9 + 16 + 40)


def test_optimizer_sync_and_prefill_by_hand() -> None:
    rates = Rates(flops=100.0, bytes_per_s=10.0)
    assert optimizer_floor(1000, rates) == 28 * 1000 / 10
    assert optimizer_floor(1000, rates, cast_bytes=2) == 30 * 1000 / 10
    assert sync_floor(1000, 2, rates) == 2 * 1000 * 2 / 10
    flops = 2 * 600 * 7 + 2 * 2 * 8 * (16 + 9) + 2 * 200 * 2
    assert prefill_floor(TINY, [4, 3], rates) == pytest.approx(flops / 100)


def test_key_value_bytes_of_known_models() -> None:
    assert kv_bytes_per_token(QWEN_0_5B, 2) == 12_288
    assert kv_bytes_per_token(QWEN_7B, 2) == 57_344


def test_replay_by_hand() -> None:
    # Responses of 3 and 2 tokens after prompts of 5 and 1: decode steps 2 and 1, together in the first step.
    lengths = [Lengths(5, 3), Lengths(1, 2)]
    kv = 2 * 4 * 2
    first, second = 800 * 2 + kv * (6 + 2), 800 * 2 + kv * 7
    by_bytes = replay_decode(TINY, lengths, Rates(flops=1e30, bytes_per_s=1.0), number_bytes=2, slots=None)
    assert by_bytes.seconds == first + second
    assert by_bytes.busy_frac == 3 / 4
    attention = 4 * 2 * 8
    by_flops = replay_decode(TINY, lengths, Rates(flops=1.0, bytes_per_s=1e30), number_bytes=2, slots=None)
    assert by_flops.seconds == 2 * 800 * 2 + attention * 8 + 2 * 800 * 1 + attention * 7


def test_replay_waits_for_a_free_slot() -> None:
    # Two slots; decode steps 4, 1, 2: the third sequence follows the second, and all are done after 4 steps.
    lengths = [Lengths(1, 5), Lengths(1, 2), Lengths(1, 3)]
    rates = Rates(flops=1e30, bytes_per_s=1.0)
    served = replay_decode(TINY, lengths, rates, number_bytes=1, slots=2)
    contexts = [2 + 2, 3 + 2, 4 + 3, 5]
    assert served.seconds == sum(800 + 8 * context for context in contexts)
    assert served.busy_frac == 7 / 8
    assert replay_decode(TINY, lengths, rates, number_bytes=1, slots=1).seconds > served.seconds


def test_tail_is_time_with_few_slots_busy() -> None:
    # Eight sequences of 2 decode steps and one of 20: 18 of 20 steps run one of nine.
    lengths = [Lengths(1, 3)] * 8 + [Lengths(1, 21)]
    served = replay_decode(TINY, lengths, Rates(flops=1e30, bytes_per_s=1.0), number_bytes=1000, slots=None)
    assert 0.85 < served.tail_frac < 0.95
    assert replay_decode(TINY, [Lengths(1, 3)] * 8, ONE, number_bytes=2, slots=None).tail_frac == 0


def test_nothing_to_decode_takes_no_time() -> None:
    assert replay_decode(TINY, [], ONE, number_bytes=2, slots=4).seconds == 0
    assert replay_decode(TINY, [Lengths(3, 1)], ONE, number_bytes=2, slots=4).seconds == 0


@pytest.mark.parametrize(
    ("shape", "batch", "context", "tokens_per_s"),
    [
        (QWEN_0_5B, 1, 1024, 4297),
        (QWEN_0_5B, 256, 8192, 41_100),
        (QWEN_7B, 32, 2048, 7200),
        (QWEN_7B, 128, 4096, 12_100),
    ],
)
def test_decode_speed_of_known_models_on_an_h200(
    shape: ModelShape, batch: int, context: int, tokens_per_s: float
) -> None:
    # One decode step, bfloat16, with 790 TFLOP/s and 4.3 TB/s; an embedding of its own is not read, so 7B is faster.
    served = replay_decode(shape, [Lengths(context - 1, 2)] * batch, H200, number_bytes=2, slots=None)
    assert batch / served.seconds == pytest.approx(tokens_per_s, rel=0.09)


@given(
    lengths=st.lists(st.builds(Lengths, st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=30),
    slots=st.integers(1, 12),
)
def test_the_replay_does_all_the_work_and_never_less(lengths: list[Lengths], slots: int) -> None:
    compute_bound = Rates(flops=1.0, bytes_per_s=1e30)
    decoded = sum(each.response - 1 for each in lengths)
    contexts = sum(each.prompt + 1 + step for each in lengths for step in range(each.response - 1))
    served = replay_decode(TINY, lengths, compute_bound, number_bytes=2, slots=slots)
    assert served.seconds == pytest.approx(2 * 800 * decoded + 4 * 2 * 8 * contexts)
    assert 0 < served.busy_frac <= 1
    # Fewer slots read the weights more often.
    memory_bound = Rates(flops=1e30, bytes_per_s=1.0)
    alone, wide = (replay_decode(TINY, lengths, memory_bound, number_bytes=2, slots=n).seconds for n in (1, None))
    some = replay_decode(TINY, lengths, memory_bound, number_bytes=2, slots=slots).seconds
    longest = max(each.response for each in lengths) - 1
    assert longest * 800 * 2 <= wide <= some * (1 + 1e-12) <= alone * (1 + 1e-9)
