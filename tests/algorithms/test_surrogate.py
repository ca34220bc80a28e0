"""Surrogates and their gradients against numbers worked by hand."""

import math

import torch

from algorithms.config import LossConfig
from algorithms.surrogate import SURROGATES, Surrogate


def surrogate_at(
    name: str, ratios: list[float], advantages: list[float], config: LossConfig
) -> tuple[Surrogate, list[float]]:
    """The surrogate at these ratios, and its gradient with respect to log pi_theta."""
    anchor = torch.full((len(ratios),), -1.0)
    logprobs = (anchor + torch.tensor(ratios).log()).requires_grad_()
    surrogate = SURROGATES[name](logprobs, anchor_logprobs=anchor, advantages=torch.tensor(advantages), config=config)
    surrogate.loss.sum().backward()
    assert logprobs.grad is not None
    return surrogate, logprobs.grad.tolist()


def assert_close(actual: torch.Tensor | list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.as_tensor(actual), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_ppo_clip_with_separate_bounds() -> None:
    config = LossConfig(clip_low=0.2, clip_high=0.28)
    ratios = [0.7, 1.1, 1.25, 1.5, 0.7, 1.1, 1.5, 5.0]
    advantages = [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]
    surrogate, gradient = surrogate_at("ppo_clip", ratios, advantages, config)
    assert_close(surrogate.loss.detach(), [-0.7, -1.1, -1.25, -1.28, 0.8, 1.1, 1.5, 5.0])
    # d(-r A)/d log pi = -r A where the clip does not bind, 0 where it does.
    assert_close(gradient, [-0.7, -1.1, -1.25, 0.0, 0.0, 1.1, 1.5, 5.0])
    assert_close(surrogate.ratio, ratios)
    assert surrogate.clipped_high.tolist() == [False, False, False, True, False, False, False, False]
    assert surrogate.clipped_low.tolist() == [False, False, False, False, True, False, False, False]


def test_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    config = LossConfig(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    surrogate, gradient = surrogate_at("ppo_clip", [5.0, 2.9, 5.0, 0.1], [-2.0, -2.0, 2.0, 2.0], config)
    assert_close(surrogate.loss.detach(), [6.0, 5.8, -2.4, -0.2])
    assert_close(gradient, [0.0, 5.8, 0.0, -0.2])


def test_the_log_ratio_is_clamped_at_20() -> None:
    logprobs = torch.tensor([0.0, -100.0], requires_grad=True)
    anchor = torch.tensor([-100.0, 0.0])
    surrogate = SURROGATES["ppo_clip"](
        logprobs, anchor_logprobs=anchor, advantages=torch.tensor([-1.0, -1.0]), config=LossConfig()
    )
    torch.testing.assert_close(surrogate.ratio, torch.tensor([math.exp(20), math.exp(-20)]))
    surrogate.loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0, 0.0]


def test_reinforce_is_unclipped_and_its_ratio_carries_no_gradient() -> None:
    surrogate, gradient = surrogate_at("reinforce", [0.5, 4.0], [2.0, -3.0], LossConfig())
    log_pi = [-1 + math.log(0.5), -1 + math.log(4.0)]
    assert_close(surrogate.loss.detach(), [-2 * log_pi[0], 3 * log_pi[1]])
    assert gradient == [-2.0, 3.0]
    assert_close(surrogate.ratio, [0.5, 4.0])
    assert not surrogate.ratio.requires_grad
    assert not surrogate.clipped_low.any() and not surrogate.clipped_high.any()
