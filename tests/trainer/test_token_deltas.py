"""trainer/batch/token_deltas.py and what samples.jsonl keeps of it: the right tokens of the right samples, and few."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from algorithms.tokens import Tokens
from rollout.types import FinishReason, Prompt, Sample, SampleGroup
from trainer.batch.packing import micro_batch
from trainer.batch.token_deltas import MAX_TOKENS, choose, merge_ranks, worst_and_others
from trainer.batch.train_batch import MicroBatch
from trainer.tracking.samples import TokenLog, sample_rows


def make_sample(prompt_id: int, index: int, *, num_response: int = 3, tool: int = 0) -> Sample:
    """Two prompt tokens, a response, and `tool` tokens after it that the model did not sample."""
    sampled = [False, False, *[True] * num_response, *[False] * tool]
    return Sample(
        prompt_id=prompt_id, sample_index=index, token_ids=[100 * prompt_id + i for i in range(len(sampled))],
        response_mask=sampled, rollout_logprobs=[-0.5 if on else 0.0 for on in sampled],
        token_versions=[0] * len(sampled), finish_reason=FinishReason.stop, reward=0.0, correct=False,
    )  # fmt: skip


@dataclass
class Words:
    """A tokenizer of one word per id."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return f"<{token_ids[0]}>"


def scored(
    samples: list[Sample], deltas: dict[tuple[int, int], float], *, first: int = 0
) -> list[tuple[MicroBatch, Tokens]]:
    """`samples` in one micro-batch, with log pi_old that is off by `deltas` at (sample, token); the number of the first
    of them in the step is `first`."""
    micro = micro_batch(samples, range(first, first + len(samples)), policy_version=None)
    old = micro.rollout_logprobs.clone()
    for (number, token), delta in deltas.items():
        old[int(micro.cu_seqlens[number]) + token] += delta
    return [(micro, micro.tokens(old))]


def test_deltas_are_those_of_the_sample_and_its_sampled_tokens() -> None:
    samples = [make_sample(1, 0), make_sample(2, 0, tool=1)]
    tokens = scored(samples, {(0, 3): 0.25, (1, 4): -0.125})
    found = worst_and_others(tokens, {0: 1e-3, 1: 1e-6}, count=2)
    assert found[0].deltas == pytest.approx([0.0, 0.25, 0.0])
    assert (found[0].first, found[0].token_ids) == (2, [102, 103, 104])
    assert found[1].deltas == [0.0, 0.0, -0.125, None] and found[1].rollout_logprobs[3] is None
    assert list(worst_and_others(tokens, {0: 1e-3, 1: 1e-6}, count=1)) == [0], "the worst one"
    assert worst_and_others(tokens, {0: 1e-3, 1: 1e-6}, count=0) == {}


def test_a_long_response_is_kept_around_its_worst_token() -> None:
    size = 4 * MAX_TOKENS
    tokens = scored([make_sample(1, 0, num_response=size)], {(0, 700): -2.0, (0, 10): 0.5})
    found = worst_and_others(tokens, {0: 1.0}, count=1)[0]
    assert len(found.deltas) == MAX_TOKENS and found.deltas[700 - found.first] == -2.0
    at_the_end = scored([make_sample(1, 0, num_response=size)], {(0, size + 1): -2.0})
    found = worst_and_others(at_the_end, {0: 1.0}, count=1)[0]
    assert (len(found.deltas), found.deltas[-1]) == (MAX_TOKENS, -2.0)


def test_what_cannot_be_scored_is_none() -> None:
    tokens = scored([make_sample(1, 0)], {(0, 2): math.nan})
    assert worst_and_others(tokens, {0: 0.0}, count=1)[0].deltas == [None, 0.0, 0.0]


def test_half_are_the_worst_and_ranks_agree_on_them() -> None:
    k3 = {number: number * 1e-6 for number in range(20)} | {20: math.nan}
    chosen = choose(k3, count=5)
    assert chosen[:3] == [19, 18, 17] and len(set(chosen)) == 5
    assert chosen == choose(dict(reversed(k3.items())), count=5), "the same in every repetition"
    ranks = [
        worst_and_others(
            scored([make_sample(number, 0) for number in half], {}, first=half[0]),
            {number: k3[number] for number in half},
            count=4,
        )
        for half in (range(10), range(10, 21))
    ]
    merged = merge_ranks(ranks, k3)
    assert len(merged) == 4 and list(merged)[:2] == [19, 18]


def test_rows_with_tokens_are_among_those_that_are_written() -> None:
    samples = [make_sample(prompt, index) for prompt in range(4) for index in range(3)]
    groups = [
        SampleGroup(prompt=Prompt(prompt_id=p, token_ids=[1], text="", answer=""), samples=samples[3 * p : 3 * p + 3])
        for p in range(4)
    ]
    k3 = {number: 1e-6 * number for number in range(len(samples))}
    deltas = worst_and_others(scored(samples, {(0, 3): 0.123456789}), k3 | {0: 1.0, 5: 0.5}, count=2)
    log = TokenLog(deltas=deltas, tokenizer=Words())  # type: ignore[arg-type]
    rows = sample_rows(groups, count=8, k3=k3 | {0: 1.0, 5: 0.5}, advantages={}, tokens=log)
    with_tokens = {(row.prompt_id, row.sample_index): row.tokens for row in rows if row.tokens is not None}
    assert set(with_tokens) == {(0, 0), (1, 2)}, "none is lost to the choice of rows"
    kept = with_tokens[0, 0]
    assert kept is not None and (kept.first, kept.num_tokens, kept.texts) == (0, 3, ["<2>", "<3>", "<4>"])
    assert kept.deltas == [0.0, 0.1235, 0.0]
