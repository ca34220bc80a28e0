"""The sampling law: evenly spaced draws must land on tokens in proportion to their probabilities."""

import pytest
import torch

from rollout.decoding import sample_tokens


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
