"""Loss statistics: by hand, and with nothing to average. Mismatch statistics: test_mismatch_stats.py."""

import pytest
import torch
from algorithm_cases import packed

from algorithms.config.loss import PPOClipConfig
from algorithms.loss import SURROGATES, SurrogateTokens, loss_stats


def test_loss_statistics_by_hand() -> None:
    config = PPOClipConfig(clip_low=0.2, clip_high=0.28)
    anchor = torch.full((5,), -2.0)
    ratios = torch.tensor([1.5, 0.5, 1.0, 1.2, 9.0])
    surrogate = SURROGATES["ppo_clip"](
        SurrogateTokens(
            logprobs=anchor + ratios.log(),
            anchor_logprobs=anchor,
            advantages=torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]),
            response_mask=torch.ones(5, dtype=torch.bool),
            cu_seqlens=packed(5),
        ),
        config,
    )
    active = torch.tensor([True, True, True, True, False])
    stats = loss_stats(
        surrogate,
        log_ratio=ratios.log(),
        policy=torch.tensor(2.0),
        active=active,
        invalid=torch.tensor([False, False, False, False, True]),
        entropy=torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0]),
        response_mask=torch.ones(5, dtype=torch.bool),
    )
    expected = {
        "loss/policy": 2.0,
        "loss/clip_frac_low": 0.25,
        "loss/clip_frac_high": 0.25,
        "loss/ratio_mean": 1.05,
        "loss/ratio_max": 1.5,
        # r - 1 - log r of the four: 0.094535, 0.193147, 0, 0.017678.
        "loss/approx_kl": 0.0763402,
        "loss/invalid_tokens": 1.0,
        "policy/entropy": 4.0,
    }
    assert stats.metrics() == pytest.approx(expected)
    twice = stats.merge(stats)
    assert twice.metrics(optimizer_steps=2) == pytest.approx({**expected, "loss/invalid_tokens": 2.0})


def test_loss_statistics_without_tokens_or_entropy_are_none() -> None:
    nothing = torch.zeros(2, dtype=torch.bool)
    surrogate = SURROGATES["ppo_clip"](
        SurrogateTokens(
            logprobs=torch.zeros(2),
            anchor_logprobs=torch.zeros(2),
            advantages=torch.zeros(2),
            response_mask=nothing,
            cu_seqlens=packed(2),
        ),
        PPOClipConfig(),
    )
    stats = loss_stats(
        surrogate,
        log_ratio=torch.zeros(2),
        policy=torch.tensor(0.0),
        active=nothing,
        invalid=nothing,
        entropy=None,
        response_mask=torch.ones(2, dtype=torch.bool),
    )
    present = {name: value for name, value in stats.metrics().items() if value is not None}
    assert present == {"loss/policy": 0.0, "loss/invalid_tokens": 0.0}
