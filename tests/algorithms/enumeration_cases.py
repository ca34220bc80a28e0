"""Exact expectations by enumeration: all responses over a small vocabulary, tabular policies, float64.

A policy is a table of logits, one row per prefix. Sampling from mu is replaced by all responses y, weighted with
mu(y), so that an expected gradient can be compared to rounding with the gradient of J = E_pi[A(y)], and the variance
of a one-sample estimate has no sampling error either. S: responses, L: response tokens of each, V: vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, product

import torch
from algorithm_cases import packed
from torch import Tensor

from algorithms.config import Compared, CorrectionConfig, LossConfig, PPOClipConfig
from algorithms.config.combine import resolved_loss
from algorithms.correction import Correction, correct
from algorithms.loss import policy_loss
from algorithms.tokens import Tokens

VOCABULARY = 3
OBSERVATION_LOGPROB = -7.0
"""Stands where a token of the environment would be: off the mask, read by nobody."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Three tabular policies and the advantages of all responses."""

    logits: Tensor
    """[prefixes, V] of pi_theta, with gradient."""
    old_logits: Tensor
    """[prefixes, V] of pi_old."""
    rollout_logits: Tensor
    """[prefixes, V] of mu."""
    advantages: Tensor
    """[S, L]; the same for all tokens of a response if nothing else is said."""
    states: Tensor
    """[S, L] prefix of each token."""
    tokens: Tensor
    """[S, L]"""
    turns: tuple[int, ...]
    """Tokens of each assistant turn, sum L; between two turns lies one token of the environment."""

    def logprobs(self, logits: Tensor) -> Tensor:
        """[S, L] log-prob of every token of every response."""
        return logits.log_softmax(-1)[self.states, self.tokens]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def mu(self) -> Tensor:
        """[S] probability of each response under mu."""
        return self.logprobs(self.rollout_logits).sum(1).exp()

    def log_rho(self) -> Tensor:
        """[S, L] log pi_old - log mu."""
        return self.logprobs(self.old_logits) - self.logprobs(self.rollout_logits)

    def ascent(self, coefficients: Tensor) -> Tensor:
        """[prefixes, V] sum of coefficients [S, L] x grad log pi_theta of the token."""
        (gradient,) = torch.autograd.grad((coefficients.detach() * self.logprobs(self.logits)).sum(), self.logits)
        return gradient

    def true_gradient(self) -> Tensor:
        """[prefixes, V] gradient of -E_pi_theta[A], for one advantage per response."""
        expected = (self.logprobs(self.logits).sum(1).exp() * self.advantages[:, 0]).sum()
        (gradient,) = torch.autograd.grad(-expected, self.logits)
        return gradient


def random_case(
    seed: int, *, noise: float, length: int = 3, turns: tuple[int, ...] | None = None, drift: float = 0.0
) -> Case:
    """mu is pi_old with normal noise on its logits; pi_theta is pi_old, or that with noise of size `drift`."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [p for n in range(length) for p in product(range(VOCABULARY), repeat=n)]
    number = {prefix: n for n, prefix in enumerate(prefixes)}
    responses = list(product(range(VOCABULARY), repeat=length))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = normal(len(prefixes), VOCABULARY)
    return Case(
        rollout_logits=old + noise * normal(len(prefixes), VOCABULARY),
        advantages=normal(len(responses), 1).expand(-1, length),
        old_logits=old,
        logits=(old + drift * normal(len(prefixes), VOCABULARY)).requires_grad_(),
        states=torch.tensor([[number[y[:t]] for t in range(length)] for y in responses]),
        tokens=torch.tensor(responses),
        turns=(length,) if turns is None else turns,
    )


@dataclass(frozen=True, kw_only=True)
class Packed:
    """All responses of a case as one micro-batch, turns apart, in the order of the case."""

    columns: Tensor
    """[L] where the response tokens stand in a packed response."""
    width: int
    """Tokens of a packed response."""
    num_responses: int

    @classmethod
    def of(cls, case: Case) -> Packed:
        starts = [0, *accumulate(length + 1 for length in case.turns)]
        columns = [start + t for start, length in zip(starts[:-1], case.turns, strict=True) for t in range(length)]
        return cls(columns=torch.tensor(columns), width=starts[-1] - 1, num_responses=len(case.tokens))

    def pack(self, values: Tensor, filler: float = 0.0) -> Tensor:
        """[S, L] -> [T]."""
        return values.new_full((self.num_responses, self.width), filler).index_copy(1, self.columns, values).flatten()

    def unpack(self, values: Tensor) -> Tensor:
        """[T] -> [S, L]."""
        return values.view(self.num_responses, self.width)[:, self.columns]

    @property
    def mask(self) -> Tensor:
        on = torch.ones(self.num_responses, len(self.columns), dtype=torch.bool)
        return self.pack(on, filler=False)

    @property
    def cu_seqlens(self) -> Tensor:
        return packed(*[self.width] * self.num_responses)


def corrected_case(case: Case, config: CorrectionConfig) -> Correction:
    """The correction of all responses, with the log-probs that the config compares."""
    layout = Packed.of(case)
    trainer = case.logits if config.spec().compared is Compared.current else case.old_logits
    tokens = Tokens(
        trainer_logprobs=layout.pack(case.logprobs(trainer).detach(), OBSERVATION_LOGPROB),
        rollout_logprobs=layout.pack(case.logprobs(case.rollout_logits), OBSERVATION_LOGPROB),
        response_mask=layout.mask,
        cu_seqlens=layout.cu_seqlens,
        advantages=layout.pack(case.advantages),
    )
    return correct(config.spec(), tokens)


def score_coefficients(case: Case, config: CorrectionConfig, loss_config: LossConfig | None = None) -> Tensor:
    """d loss(y) / d log pi_theta(token) with denominator 1 -> [S, L]: the loss of a response has the gradient
    sum over its tokens of coefficient x grad log pi_theta. One row per response: none reads another."""
    layout = Packed.of(case)
    mask = layout.mask
    logprobs = layout.pack(case.logprobs(case.logits).detach(), OBSERVATION_LOGPROB).requires_grad_()
    output = policy_loss(
        logprobs,
        entropy=None,
        advantages=layout.pack(case.advantages),
        response_mask=mask,
        cu_seqlens=layout.cu_seqlens,
        correction=corrected_case(case, config),
        coefficients=mask.double(),
        loss_config=resolved_loss(config, PPOClipConfig() if loss_config is None else loss_config),
    )
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return layout.unpack(gradient)


def expected_gradient(case: Case, config: CorrectionConfig, loss_config: LossConfig | None = None) -> Tensor:
    """Gradient of E_mu[policy loss of a response] -> [prefixes, V], by enumeration."""
    return case.ascent(case.mu().unsqueeze(1) * score_coefficients(case, config, loss_config))


def relative_error(gradient: Tensor, truth: Tensor) -> float:
    """|gradient - truth| / |truth|."""
    return ((gradient - truth).norm() / truth.norm()).item()


def relative_bias(case: Case, config: CorrectionConfig, loss_config: LossConfig | None = None) -> float:
    """|E_mu[gradient] - true gradient| / |true gradient|."""
    return relative_error(expected_gradient(case, config, loss_config), case.true_gradient())


def relative_deviation(case: Case, config: CorrectionConfig, loss_config: LossConfig | None = None) -> float:
    """sqrt(E_mu |g(y)|^2 - |E_mu g(y)|^2) / |true gradient| of the gradient g(y) of one response.

    The tokens of a response have different prefixes, and grad log pi(a | s) = e_a - pi(. | s) lies in row s alone:
    |g(y)|^2 is a sum over tokens.
    """
    coefficients = score_coefficients(case, config, loss_config)
    with torch.no_grad():
        probabilities = case.logits.softmax(-1)[case.states]
        chosen = probabilities.gather(2, case.tokens.unsqueeze(2)).squeeze(2)
        score_squared = probabilities.square().sum(2) - 2 * chosen + 1
        second_moment = (case.mu() * (coefficients.square() * score_squared).sum(1)).sum()
    mean = case.ascent(case.mu().unsqueeze(1) * coefficients)
    variance = second_moment - mean.square().sum()
    return (variance.sqrt() / case.true_gradient().norm()).item()


def with_values_to_go(case: Case) -> Case:
    """The case with A(token) = E_pi_old[A(y) | the prefix with the token] in place of A(y)."""
    pi = case.logprobs(case.old_logits).sum(1).exp()
    columns = []
    for t in range(case.length):
        # The prefix with the token as one number.
        _, group = torch.unique(case.tokens[:, : t + 1], dim=0, return_inverse=True)
        size = int(group.max()) + 1
        mass = torch.zeros(size, dtype=pi.dtype).index_add(0, group, pi)
        total = torch.zeros(size, dtype=pi.dtype).index_add(0, group, pi * case.advantages[:, 0])
        columns.append((total / mass)[group])
    return replace(case, advantages=torch.stack(columns, dim=1))
