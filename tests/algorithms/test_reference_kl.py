"""KL to a reference: hand-worked numbers, and the exact expectation of value and gradient of every estimator.

A policy is a table of logits, one row per prefix, over a vocabulary of 3. All responses y of the sampling policy are
enumerated in float64 and weighted with their probability, so expectations are exact.
"""

import math
from itertools import product

import pytest
import torch
from algorithm_cases import packed
from torch import Tensor

from algorithms.advantage import sample_advantages
from algorithms.config.advantage import Estimator
from algorithms.config.reference import KLEstimator, KLPlacement, ReferenceKLConfig
from algorithms.config.rules import ConfigError
from algorithms.masked import segment_sum
from algorithms.reference import reference_kl, reference_kl_loss, reference_kl_penalty, reference_kl_stats
from algorithms.returns import gae, token_rewards

# L = log pi_theta - log pi_ref = ln 2, -ln 2, 0; pi_theta / pi_old = 2, 1/2, 1.
LOG2 = math.log(2)
LOGPROBS = torch.tensor([-1.0, -2.0, -0.5])
REF = LOGPROBS - torch.tensor([LOG2, -LOG2, 0.0])
OLD = LOGPROBS - torch.tensor([LOG2, -LOG2, 0.0])
K3 = [LOG2 - 0.5, 1 - LOG2, 0.0]
BY_HAND = {
    KLEstimator.k1: [LOG2, -LOG2, 0.0],
    KLEstimator.k2: [LOG2**2 / 2, LOG2**2 / 2, 0.0],
    KLEstimator.k3: K3,
    KLEstimator.unbiased: [2 * K3[0], K3[1] / 2, 0.0],
}
"""exp(-L) - 1 + L: 1/2 - 1 + ln 2, and 2 - 1 - ln 2."""


@pytest.mark.parametrize("estimator", KLEstimator)
def test_estimates_by_hand(estimator: KLEstimator) -> None:
    found = reference_kl(LOGPROBS, ref_logprobs=REF, anchor_logprobs=OLD, estimator=estimator)
    torch.testing.assert_close(found, torch.tensor(BY_HAND[estimator]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (KLEstimator.k1, [1, 1, 1]),  # d L
        (KLEstimator.k2, [LOG2, -LOG2, 0]),  # L
        (KLEstimator.k3, [0.5, -1, 0]),  # 1 - exp(-L)
        (KLEstimator.unbiased, [2 * LOG2, -LOG2 / 2, 0]),  # ratio x (k3 + 1 - exp(-L)) = ratio x L
    ],
)
def test_gradients_by_hand(estimator: KLEstimator, expected: list[float]) -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    reference_kl(logprobs, ref_logprobs=REF, anchor_logprobs=OLD, estimator=estimator).sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor(expected).float(), rtol=1e-5, atol=1e-7)


class Case:
    """All responses of a length over a vocabulary of 3, and random tabular policies; S responses, T = S x length."""

    def __init__(self, seed: int, *, length: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        prefixes = [prefix for n in range(length) for prefix in product(range(3), repeat=n)]
        number = {prefix: n for n, prefix in enumerate(prefixes)}
        responses = list(product(range(3), repeat=length))
        self.length = length
        self.states = torch.tensor([[number[y[:t]] for t in range(length)] for y in responses])
        self.tokens = torch.tensor(responses)
        base = torch.randn(len(prefixes), 3, generator=generator, dtype=torch.float64)
        noise = torch.randn(2, len(prefixes), 3, generator=generator, dtype=torch.float64)
        self.theta = base.clone().requires_grad_()
        self.ref, self.old = base + 0.7 * noise[0], base + 0.5 * noise[1]
        self.layout = {
            "response_mask": torch.ones(self.tokens.numel(), dtype=torch.bool),
            "cu_seqlens": packed(*[length] * len(responses)),
        }

    def logprobs(self, logits: Tensor) -> Tensor:
        """[S, length] log-prob of every token of every response."""
        return logits.log_softmax(-1)[self.states, self.tokens]

    def probability(self, logits: Tensor) -> Tensor:
        """[S] of the response."""
        return self.logprobs(logits).sum(1).exp()

    def per_token(self, response: Tensor) -> Tensor:
        """[S] -> [T]."""
        return response.repeat_interleave(self.length)

    def gradient(self, value: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(value, self.theta)
        return gradient

    def expected(self, estimator: KLEstimator, *, sampler: Tensor) -> tuple[Tensor, Tensor]:
        """E_sampler of the sum of the estimates of a response, and its gradient, by enumeration."""
        estimate = reference_kl(
            self.logprobs(self.theta).flatten(),
            ref_logprobs=self.logprobs(self.ref).flatten(),
            anchor_logprobs=self.logprobs(sampler).flatten(),
            estimator=estimator,
        )
        total = (self.per_token(self.probability(sampler).detach()) * estimate).sum()
        return total.detach(), self.gradient(total)

    def token_kl(self, *, sampler: Tensor, mirrored: bool = False) -> tuple[Tensor, Tensor]:
        """Sum over t of E_prefix~sampler KL_t(pi_theta || pi_ref), exact over the vocabulary, and its gradient.

        `mirrored` is KL_t(pi_ref || pi_theta).
        """
        theta, ref = self.theta.log_softmax(-1), self.ref.log_softmax(-1)
        first, second = (ref, theta) if mirrored else (theta, ref)
        per_prefix = (first.exp() * (first - second)).sum(-1)
        total = (self.probability(sampler).detach()[:, None] * per_prefix[self.states]).sum()
        return total.detach(), self.gradient(total)

    def response_kl(self) -> tuple[Tensor, Tensor]:
        """KL of whole responses, KL(pi_theta(y) || pi_ref(y)), and its gradient."""
        log_ratio = self.logprobs(self.theta).sum(1) - self.logprobs(self.ref).sum(1)
        total = (self.probability(self.theta) * log_ratio).sum()
        return total.detach(), self.gradient(total)


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-12 * expected.norm().clamp(min=1))


def far(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() > 0.05 * expected.norm())


CASES = [(seed, length) for seed in range(3) for length in (1, 3)]


@pytest.mark.parametrize(("seed", "length"), CASES)
def test_on_policy_values(seed: int, length: int) -> None:
    case = Case(seed, length=length)
    kl, _ = case.token_kl(sampler=case.theta)
    assert close(kl, case.response_kl()[0])  # the chain rule of the KL
    for estimator in (KLEstimator.k1, KLEstimator.k3, KLEstimator.unbiased):
        assert close(case.expected(estimator, sampler=case.theta)[0], kl), estimator
    assert not close(case.expected(KLEstimator.k2, sampler=case.theta)[0], kl)


@pytest.mark.parametrize(("seed", "length"), CASES)
def test_on_policy_gradients_in_the_loss(seed: int, length: int) -> None:
    case = Case(seed, length=length)
    _, right = case.token_kl(sampler=case.theta)
    _, mirrored = case.token_kl(sampler=case.theta, mirrored=True)
    assert far(right, torch.zeros_like(right)) and far(mirrored, right)
    assert case.expected(KLEstimator.k1, sampler=case.theta)[1].abs().max().item() < 1e-14
    assert close(case.expected(KLEstimator.k2, sampler=case.theta)[1], right)
    assert close(case.expected(KLEstimator.k3, sampler=case.theta)[1], mirrored)
    assert close(case.expected(KLEstimator.unbiased, sampler=case.theta)[1], right)


@pytest.mark.parametrize(("seed", "length"), CASES)
def test_off_policy_only_the_unbiased_form_is_right(seed: int, length: int) -> None:
    case = Case(seed, length=length)
    kl, right = case.token_kl(sampler=case.old)
    value, gradient = case.expected(KLEstimator.unbiased, sampler=case.old)
    assert close(value, kl) and close(gradient, right)
    for estimator in (KLEstimator.k1, KLEstimator.k2, KLEstimator.k3):
        assert far(case.expected(estimator, sampler=case.old)[1], right), estimator


def test_tokens_of_the_rollout_engine_need_its_own_logprobs_or_its_weight() -> None:
    """Sampled by mu, not by pi_old: k3 x pi_theta / pi_old is right with the weight pi_old / mu, and only with it."""
    case = Case(3, length=3)
    mu = case.old + 0.3 * torch.randn(case.old.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    _, right = case.token_kl(sampler=mu)
    probability = case.per_token(case.probability(mu))
    rho = (case.logprobs(case.old) - case.logprobs(mu)).exp().flatten()

    def gradient(anchor: Tensor, coefficients: Tensor) -> Tensor:
        loss = reference_kl_loss(
            case.logprobs(case.theta).flatten(),
            ref_logprobs=case.logprobs(case.ref).flatten(),
            anchor_logprobs=case.logprobs(anchor).flatten(),
            response_mask=case.layout["response_mask"],
            coefficients=coefficients,
            config=ReferenceKLConfig(coef=1.0),
        )
        return case.gradient(loss)

    assert close(gradient(mu, probability), right)
    assert close(gradient(case.old, probability * rho), right)
    assert far(gradient(case.old, probability), right)


def test_the_gradient_in_the_loss_is_per_token_and_the_one_in_the_reward_of_whole_responses() -> None:
    case = Case(0, length=3)
    assert far(case.token_kl(sampler=case.theta)[1], case.response_kl()[1])


def reward_gradient(case: Case, estimator: KLEstimator) -> Tensor:
    """Gradient of E[-sum_t A_t log pi_theta] with the KL as the only reward and returns as advantages."""
    logprobs = case.logprobs(case.theta)
    penalty = reference_kl_penalty(
        logprobs.flatten(),
        ref_logprobs=case.logprobs(case.ref).flatten(),
        response_mask=case.layout["response_mask"],
        config=ReferenceKLConfig(coef=1.0, estimator=estimator, placement=KLPlacement.reward),
    )
    nothing = torch.zeros(len(logprobs), dtype=torch.float64)
    rewards = token_rewards(nothing, penalty=penalty, **case.layout)
    advantages, _ = gae(rewards, torch.zeros_like(rewards), gamma=1.0, gae_lambda=1.0, **case.layout)
    weight = case.per_token(case.probability(case.theta).detach())
    return case.gradient(-(weight * advantages * logprobs.flatten()).sum())


@pytest.mark.parametrize("length", [1, 3])
def test_k1_in_the_reward_has_the_gradient_of_the_kl_of_responses(length: int) -> None:
    case = Case(1, length=length)
    assert close(reward_gradient(case, KLEstimator.k1), case.response_kl()[1])


def test_k1_taken_off_the_reward_of_the_sample_has_it_too() -> None:
    case = Case(2, length=3)
    logprobs = case.logprobs(case.theta)
    penalty = reference_kl_penalty(
        logprobs.flatten().float(),
        ref_logprobs=case.logprobs(case.ref).flatten().float(),
        response_mask=case.layout["response_mask"],
        config=ReferenceKLConfig(coef=1.0, estimator=KLEstimator.k1, placement=KLPlacement.reward),
    )
    ids = torch.arange(len(logprobs))
    advantages = sample_advantages(
        Estimator.reinforce, -segment_sum(penalty, case.layout["cu_seqlens"]), ids, epsilon=1e-6
    )
    found = case.gradient(-(case.probability(case.theta).detach() * advantages * logprobs.sum(1)).sum())
    torch.testing.assert_close(found, case.response_kl()[1], rtol=0, atol=1e-6)


def test_k2_and_k3_in_the_reward_are_biased() -> None:
    case = Case(1, length=1)
    _, right = case.token_kl(sampler=case.theta)
    _, mirrored = case.token_kl(sampler=case.theta, mirrored=True)
    assert close(reward_gradient(case, KLEstimator.k3), right - mirrored)
    assert far(reward_gradient(case, KLEstimator.k3), right)
    assert far(reward_gradient(case, KLEstimator.k2), right) and far(reward_gradient(case, KLEstimator.k2), mirrored)


# ---------------------------------------------------------------- loss and penalty


MASKED = {
    "logprobs": torch.tensor([-1.0, -2.0, -0.5, math.nan, -1.0, math.nan]),
    "ref_logprobs": torch.cat([REF, torch.tensor([-1.0, -math.inf, math.nan])]),
    "response_mask": torch.tensor([True, True, True, True, True, False]),
}
"""Two tokens that count, one whose KL is 0, two invalid ones, one off the mask."""


@pytest.mark.parametrize("estimator", [KLEstimator.k2, KLEstimator.k3, KLEstimator.unbiased])
def test_the_loss_is_a_weighted_sum(estimator: KLEstimator) -> None:
    logprobs = MASKED["logprobs"].clone().requires_grad_()
    loss = reference_kl_loss(
        logprobs,
        ref_logprobs=MASKED["ref_logprobs"],
        anchor_logprobs=torch.cat([OLD, torch.tensor([-1.0, -1.0, math.inf])]),
        response_mask=MASKED["response_mask"],
        coefficients=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, math.nan]),
        config=ReferenceKLConfig(coef=0.5, estimator=estimator),
    )
    first, second, _ = BY_HAND[estimator]
    assert loss.item() == pytest.approx(0.5 * (first + 2 * second), rel=1e-6)
    loss.backward()
    assert logprobs.grad is not None and loss.dtype == torch.float32
    assert (logprobs.grad[:2] != 0).all() and logprobs.grad[2:].abs().max().item() < 1e-7


def test_an_old_logprob_that_is_not_finite_leaves_the_token_out() -> None:
    arguments = {
        "ref_logprobs": REF,
        "response_mask": torch.ones(3, dtype=torch.bool),
        "coefficients": torch.ones(3),
        "anchor_logprobs": torch.tensor([-math.inf, OLD[1].item(), OLD[2].item()]),
    }
    loss = reference_kl_loss(LOGPROBS, config=ReferenceKLConfig(coef=1.0), **arguments)
    assert loss.item() == pytest.approx(K3[1] / 2, rel=1e-6)
    loss = reference_kl_loss(
        LOGPROBS,
        config=ReferenceKLConfig(coef=1.0, estimator=KLEstimator.k3),
        **(arguments | {"anchor_logprobs": None}),
    )
    assert loss.item() == pytest.approx(K3[0] + K3[1], rel=1e-6)


@pytest.mark.parametrize("estimator", [KLEstimator.k1, KLEstimator.k2, KLEstimator.k3])
def test_the_penalty_is_detached_and_per_token(estimator: KLEstimator) -> None:
    config = ReferenceKLConfig(coef=0.5, estimator=estimator, placement=KLPlacement.reward)
    logprobs = MASKED["logprobs"].clone().requires_grad_()
    penalty = reference_kl_penalty(
        logprobs, ref_logprobs=MASKED["ref_logprobs"], response_mask=MASKED["response_mask"], config=config
    )
    assert not penalty.requires_grad and penalty.dtype == torch.float32
    expected = torch.tensor([*BY_HAND[estimator], 0, 0, 0]) / 2
    torch.testing.assert_close(penalty, expected, rtol=1e-6, atol=1e-7)


def test_statistics_count_and_add_up() -> None:
    stats = reference_kl_stats(**MASKED)
    merged = stats.merge(stats).metrics()
    assert merged == pytest.approx(
        {"reference/k1": 0.0, "reference/k3": sum(K3) / 3, "reference/invalid_tokens": 4}, abs=1e-7
    )
    nothing = reference_kl_stats(LOGPROBS, ref_logprobs=REF, response_mask=torch.zeros(3, dtype=torch.bool)).metrics()
    assert nothing == {"reference/k1": None, "reference/k3": None, "reference/invalid_tokens": 0}


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_without_response_tokens_there_is_a_graph(num_tokens: int) -> None:
    logprobs = torch.full((num_tokens,), math.nan, requires_grad=True)
    loss = reference_kl_loss(
        logprobs,
        ref_logprobs=torch.full((num_tokens,), math.nan),
        anchor_logprobs=torch.full((num_tokens,), math.nan),
        response_mask=torch.zeros(num_tokens, dtype=torch.bool),
        coefficients=torch.zeros(num_tokens),
        config=ReferenceKLConfig(coef=1.0),
    )
    loss.backward()
    assert loss.item() == 0 and logprobs.grad is not None and logprobs.grad.tolist() == [0] * num_tokens


def test_far_apart_policies_stay_finite() -> None:
    logprobs = torch.tensor([-80.0, -1e-3], requires_grad=True)
    loss = reference_kl_loss(
        logprobs,
        ref_logprobs=torch.tensor([-1e-3, -80.0]),
        anchor_logprobs=torch.tensor([-1e-3, -80.0]),
        response_mask=torch.ones(2, dtype=torch.bool),
        coefficients=torch.ones(2),
        config=ReferenceKLConfig(coef=1.0),
    )
    loss.backward()
    assert logprobs.grad is not None and math.isfinite(loss.item()) and torch.isfinite(logprobs.grad).all()


# ---------------------------------------------------------------- errors, configuration, host


def test_the_placement_is_checked_so_that_the_kl_is_not_counted_twice() -> None:
    mask = torch.ones(3, dtype=torch.bool)
    in_reward = ReferenceKLConfig(coef=1.0, estimator=KLEstimator.k1, placement=KLPlacement.reward)
    with pytest.raises(ValueError, match=r"placement must be loss .*got reward.*use reference_kl_penalty"):
        reference_kl_loss(
            LOGPROBS,
            ref_logprobs=REF,
            anchor_logprobs=None,
            response_mask=mask,
            coefficients=torch.ones(3),
            config=in_reward,
        )
    with pytest.raises(ValueError, match=r"placement must be reward .*got loss.*use reference_kl_loss"):
        reference_kl_penalty(LOGPROBS, ref_logprobs=REF, response_mask=mask, config=ReferenceKLConfig(coef=1.0))


def test_what_is_missing_is_named() -> None:
    arguments = {"ref_logprobs": REF, "response_mask": torch.ones(3, dtype=torch.bool), "coefficients": torch.ones(3)}
    with pytest.raises(ValueError, match="unbiased needs anchor_logprobs"):
        reference_kl_loss(LOGPROBS, anchor_logprobs=None, config=ReferenceKLConfig(coef=1.0), **arguments)
    with pytest.raises(ValueError, match="anchor_logprobs must have the shape"):
        reference_kl_loss(LOGPROBS, anchor_logprobs=OLD[:2], config=ReferenceKLConfig(coef=1.0), **arguments)
    with pytest.raises(ValueError, match="ref_logprobs must have the shape"):
        reference_kl_stats(LOGPROBS, ref_logprobs=REF[:2], response_mask=arguments["response_mask"])


def test_combinations_without_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"must not be k1 with placement=loss.*got k1\. Use estimator=unbiased"):
        ReferenceKLConfig(coef=1e-3, estimator=KLEstimator.k1)
    with pytest.raises(ConfigError, match=r"must not be unbiased with placement=reward.*Use estimator=k1"):
        ReferenceKLConfig(coef=1e-3, placement=KLPlacement.reward)
    for value in (-1e-3, math.nan):
        with pytest.raises(ConfigError, match="coef must be >= 0"):
            ReferenceKLConfig(coef=value)
    for estimator, placement in product(KLEstimator, KLPlacement):
        if (estimator, placement) not in (
            (KLEstimator.k1, KLPlacement.loss),
            (KLEstimator.unbiased, KLPlacement.reward),
        ):
            ReferenceKLConfig(coef=1e-3, estimator=estimator, placement=placement)
    assert ReferenceKLConfig().coef == 0


def test_no_value_is_read_on_the_host() -> None:
    with torch.device("meta"):
        logprobs, mask = torch.empty(9, requires_grad=True), torch.empty(9, dtype=torch.bool)
        ref = old = coefficients = torch.empty(9)
    for estimator in (KLEstimator.k2, KLEstimator.k3, KLEstimator.unbiased):
        loss = reference_kl_loss(
            logprobs,
            ref_logprobs=ref,
            anchor_logprobs=old,
            response_mask=mask,
            coefficients=coefficients,
            config=ReferenceKLConfig(coef=1.0, estimator=estimator),
        )
        loss.backward()
        assert loss.is_meta
    in_reward = ReferenceKLConfig(coef=1.0, estimator=KLEstimator.k1, placement=KLPlacement.reward)
    assert reference_kl_penalty(logprobs, ref_logprobs=ref, response_mask=mask, config=in_reward).is_meta
    assert reference_kl_stats(logprobs, ref_logprobs=ref, response_mask=mask).sums.is_meta
