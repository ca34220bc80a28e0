"""The sampling law, and the order in which requests get their slots."""

import time

import pytest
import torch

from rollout.decoding import decode, sample_tokens
from rollout.types import FinishReason, GenerateRequest, SamplingParams


def test_sampling_follows_the_distribution_exactly():
    """Evenly spaced draws land on each token as often as its probability says, to one draw."""
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    logits = torch.tensor([0.5, -1.0, 2.0, -float("inf"), 1.5, -9.0])
    for temperature in (1.0, 0.5, 2.0):
        tokens, logprobs = sample_tokens(
            logits.expand(count, -1), temperature=torch.full((count,), temperature), uniforms=uniforms
        )
        probs = torch.softmax(logits.double() / temperature, dim=-1)
        counts = torch.bincount(tokens, minlength=6)
        assert (counts - probs * count).abs().max() <= 1
        assert torch.allclose(logprobs.double(), probs.log()[tokens], atol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_impossible_tokens_are_not_drawn_at_the_ends(seed):
    """The smallest and the largest draw, with impossible tokens on both sides and a total that is not exactly 1."""
    middle = 3 * torch.randn(50, generator=torch.Generator().manual_seed(seed))
    edge = torch.full((3,), -float("inf"))
    logits = torch.cat([edge, middle, edge]).expand(2, -1)
    uniforms = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, temperature=torch.ones(2), uniforms=uniforms)
    assert tokens.tolist() == [3, 52]
    assert torch.isfinite(logprobs).all()


def test_a_token_rarer_than_float32_resolves_keeps_its_place():
    """Shares 1/2, 1/2 and 1e-9: the last token owns the draws from 1 - 1e-9 on."""
    logits = torch.tensor([0.0, 0.0, -20.030119]).expand(3, -1)
    uniforms = torch.tensor([1 - 2e-9, 1 - 5e-10, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, temperature=torch.ones(3), uniforms=uniforms)
    assert tokens.tolist() == [1, 2, 2]
    assert logprobs[1:].tolist() == pytest.approx([-20.723266] * 2, abs=1e-5)


def test_greedy_and_sampled_rows_share_a_batch():
    logits = torch.tensor([[0.0, 2.0, 1.0]]).expand(3, -1)
    tokens, logprobs = sample_tokens(
        logits, temperature=torch.tensor([0.0, 1.0, 0.5]), uniforms=torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64)
    )
    assert tokens.tolist() == [1, 0, 0]
    # -log(e^-2 + 1 + e^-1), -log(1 + e^2 + e), -log(1 + e^4 + e^2)
    assert logprobs.tolist() == pytest.approx([-0.407606, -2.407606, -4.142932], abs=1e-5)


def test_a_broken_row_is_visible_and_stays_in_the_vocabulary():
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 1.0, 2.0]])
    tokens, logprobs = sample_tokens(
        logits, temperature=torch.ones(2), uniforms=torch.tensor([0.5, 0.5], dtype=torch.float64)
    )
    assert 0 <= tokens[0] < 3
    assert logprobs.isnan().tolist() == [True, False]


class CountingDecoder:
    """Next token = last token + 1, whatever came before; remembers what it was asked."""

    def __init__(self) -> None:
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.prompts: list[int] = []
        """Distinct prompts of every prefill."""
        self.rows: list[int] = []
        """Sequences of every step."""

    def prefill(self, token_ids, lengths, forward):
        self.prompts.append(len(token_ids))
        return self._logits(token_ids[torch.arange(len(token_ids)), lengths - 1])

    def step(self, tokens, positions, forward):
        self.rows.append(len(tokens))
        return self._logits(tokens)

    def _logits(self, tokens):
        return torch.nn.functional.one_hot(tokens + 1, 100).float() * 1000


def counting_requests(lengths, *, group_size):
    """Request i starts after token 10 * (i // group_size) and has lengths[i] tokens."""
    return [
        GenerateRequest(
            prompt_id=index // group_size,
            sample_index=index % group_size,
            prompt_token_ids=[0] * (index // group_size) + [10 * (index // group_size)],
            sampling=SamplingParams(temperature=1.0, max_new_tokens=length, seed=index),
        )
        for index, length in enumerate(lengths)
    ]


def test_freed_slots_are_filled_at_once_and_every_response_stays_its_own():
    lengths = [3, 30, 4, 5, 30, 6, 7, 30, 8, 9, 30, 10]
    requests, decoder = counting_requests(lengths, group_size=2), CountingDecoder()
    generations = decode(decoder, requests, num_slots=4, policy_version=3, deadline=time.monotonic() + 60)
    for request, generation, length in zip(requests, generations, lengths, strict=True):
        first = request.prompt_token_ids[-1] + 1
        assert generation.token_ids == list(range(first, first + length))
        assert (generation.finish_reason, generation.token_versions) == (FinishReason.length, [3] * length)
    # Three full batches of four would take 30 + 30 + 30 tokens.
    assert len(decoder.rows) < 60
    assert max(decoder.rows) <= 4
    assert sum(decoder.prompts) <= len(lengths)


def test_a_group_reads_its_prompt_once_and_ended_sequences_leave_the_batch():
    requests, decoder = counting_requests([1, 1, 2, 9], group_size=4), CountingDecoder()
    decode(decoder, requests, num_slots=64, policy_version=0, deadline=time.monotonic() + 60)
    assert decoder.prompts == [1]
    assert decoder.rows == [2] + [1] * 7


def test_nothing_is_asked_for_nothing():
    assert decode(CountingDecoder(), [], num_slots=4, policy_version=0, deadline=0.0) == []
