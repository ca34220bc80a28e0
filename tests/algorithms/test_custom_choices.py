"""Classes of a user where a formula is chosen: they compute what their built-in twins do; wrong shapes are named."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from algorithms.advantage import sample_advantages
from algorithms.aggregate import token_coefficients
from algorithms.config import (
    Aggregation,
    Baseline,
    Bound,
    ConfigError,
    CustomAggregation,
    CustomBound,
    CustomConfig,
    CustomCriterion,
    CustomEstimator,
    CustomKLEstimator,
    CustomLevel,
    CustomLoss,
    CustomMetric,
    Divisor,
    Estimator,
    KLEstimator,
    KLPlacement,
    Level,
    PPOClipConfig,
    ReferenceKLConfig,
    RejectConfig,
)
from algorithms.correction import LEVELS, Correction, correct, weight_total
from algorithms.loss import SURROGATES, Surrogate, SurrogateTokens, policy_loss
from algorithms.mismatch import SUMS, mismatch_stats
from algorithms.reference import reference_kl, reference_kl_loss
from algorithms.rejection import CRITERIA
from algorithms.tokens import Tokens

CU = torch.tensor([0, 4, 9, 12], dtype=torch.int32)
MASK = torch.tensor([0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1], dtype=torch.bool)


def tokens() -> Tokens:
    generator = torch.Generator().manual_seed(3)
    rollout = -torch.rand(12, generator=generator) - 0.1
    trainer = rollout + 0.8 * torch.randn(12, generator=generator)
    advantages = torch.randn(12, generator=generator)
    return Tokens(
        trainer_logprobs=trainer.clamp(max=-1e-3),
        rollout_logprobs=rollout,
        response_mask=MASK,
        cu_seqlens=CU,
        advantages=advantages,
    )


@dataclass(kw_only=True)
class Sequence(CustomLevel):
    one_per_response: ClassVar[bool] = True

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        return LEVELS[Level.sequence](tokens)


@dataclass(kw_only=True)
class Truncate(CustomBound):
    high: float = 1.5

    def __call__(self, rho: Tensor, log_ratio: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        return rho.clamp(max=self.high), torch.ones_like(rho, dtype=torch.bool)


@dataclass(kw_only=True)
class Veto(CustomCriterion):
    least: float = 0.7

    def __call__(self, tokens: Tokens) -> Tensor:
        return CRITERIA["veto"](tokens, self.least)


@dataclass(kw_only=True)
class Rloo(CustomEstimator):
    baseline: ClassVar[Baseline] = Baseline.group

    def __call__(self, step: Any) -> Tensor:
        return step.deviation * step.size / (step.size - 1).clamp(min=1)  # type: ignore[no-any-return]


@dataclass(kw_only=True)
class MeanOfTokens(CustomAggregation):
    divisor: ClassVar[Divisor] = Divisor.tokens

    def __call__(self, mask: Tensor, cu_seqlens: Tensor, *, num_tokens: float, num_sequences: float) -> Tensor:
        return mask.float() / num_tokens


@dataclass(kw_only=True)
class Unbiased(CustomKLEstimator):
    reads_anchor: ClassVar[bool] = True

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, anchor_logprobs: Tensor | None) -> Tensor:
        assert anchor_logprobs is not None
        delta = ref_logprobs - logprobs
        return (logprobs - anchor_logprobs).exp() * (torch.expm1(delta) - delta)


@dataclass(kw_only=True)
class Clip(CustomLoss):
    def __call__(self, tokens: SurrogateTokens) -> Surrogate:
        return SURROGATES["ppo_clip"](tokens, PPOClipConfig())


@dataclass(kw_only=True)
class Gap(CustomMetric):
    def __call__(self, tokens: Tokens) -> Tensor:
        return tokens.delta.abs()


def same(first: Correction, second: Correction) -> bool:
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in ("anchor", "weight", "keep"))


def test_level_bound_and_criterion_equal_their_built_in_twins() -> None:
    own = CustomConfig(level=Sequence(), bound=Truncate(high=1.2), reject=RejectConfig(custom=[Veto(least=0.6)])).spec()
    twin = CustomConfig(level=Level.sequence, bound=Bound.truncate, high=1.2, reject=RejectConfig(veto=0.6)).spec()
    applied = correct(own, tokens())
    assert same(applied, correct(twin, tokens()))
    assert not applied.keep[MASK].all() and applied.keep.any(), "some tokens are rejected"
    assert torch.equal(applied.rejected["Veto"], correct(twin, tokens()).rejected["veto"])
    totals = (weight_total(spec, correct(spec, tokens()), cu_seqlens=CU) for spec in (own, twin))
    assert torch.equal(*totals), "one weight per response"


def test_estimator_aggregation_and_kl_equal_their_built_in_twins() -> None:
    rewards, groups = torch.tensor([1.0, 0, 0, 1, 1, 0.5]), torch.tensor([0, 0, 1, 1, 1, 2])
    of = (sample_advantages(each, rewards, groups, epsilon=1e-6) for each in (Rloo(), Estimator.rloo))
    torch.testing.assert_close(*of)
    counts: dict[str, Any] = {"mask": MASK, "cu_seqlens": CU, "num_tokens": 9, "num_sequences": 3}
    of = (
        token_coefficients(each, **counts, fixed_length_tokens=None)
        for each in (MeanOfTokens(), Aggregation.token_mean)
    )
    torch.testing.assert_close(*of)
    here = tokens()
    logprobs, reference = here.rollout.clone().requires_grad_(), here.train
    gradients = []
    for estimator in (Unbiased(), KLEstimator.unbiased):
        loss = reference_kl_loss(
            logprobs,
            ref_logprobs=reference,
            anchor_logprobs=here.rollout - 0.1,
            response_mask=MASK,
            coefficients=MASK.float(),
            config=ReferenceKLConfig(coef=0.1, estimator=estimator),
        )
        gradients += torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(*gradients)
    with pytest.raises(ConfigError, match="a reward is detached"):
        ReferenceKLConfig(coef=0.1, estimator=Unbiased(), placement=KLPlacement.reward)

    @dataclass(kw_only=True)
    class Blind(CustomKLEstimator):
        def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, anchor_logprobs: Tensor | None) -> Tensor:
            assert anchor_logprobs is None, "it does not say that it reads them"
            return logprobs - ref_logprobs

    reference_kl(logprobs, ref_logprobs=reference, anchor_logprobs=here.rollout, estimator=Blind())
    with pytest.raises(ValueError, match="anchor_logprobs"):
        reference_kl_loss(
            logprobs,
            ref_logprobs=reference,
            anchor_logprobs=None,
            response_mask=MASK,
            coefficients=MASK.float(),
            config=ReferenceKLConfig(coef=0.1, estimator=Unbiased()),
        )


def loss_of(config: Any, correction: Correction) -> Tensor:
    logprobs = tokens().train.clone().requires_grad_()
    output = policy_loss(
        logprobs,
        entropy=None,
        advantages=tokens().advantages,  # type: ignore[arg-type]
        response_mask=MASK,
        cu_seqlens=CU,
        correction=correction,
        coefficients=MASK.float(),
        loss_config=config,
    )
    [gradient] = torch.autograd.grad(output.loss, logprobs)
    return gradient


def test_a_loss_equals_its_built_in_twin_and_sees_mu() -> None:
    spec = CustomConfig().spec()
    correction = correct(spec, tokens())
    assert torch.equal(loss_of(Clip(), correction), loss_of(PPOClipConfig(), correction))

    @dataclass(kw_only=True)
    class Seen(Clip):
        def __call__(self, tokens: SurrogateTokens) -> Surrogate:
            assert tokens.rollout_logprobs is not None
            expected = torch.where(MASK, rollout, 0.0)
            assert torch.equal(tokens.rollout_logprobs, expected)
            return super().__call__(tokens)

    rollout = tokens().rollout
    loss_of(Seen(), correction)


def test_a_metric_is_the_mean_over_valid_tokens_and_adds_up() -> None:
    one = mismatch_stats(tokens(), metrics=[Gap()])
    assert one.metrics()["own/Gap"] == pytest.approx(one.metrics()["mismatch/abs_logdiff_mean"])
    assert one.merge(one).metrics()["own/Gap"] == pytest.approx(one.metrics()["own/Gap"])


@pytest.mark.parametrize("metric", [name for name in SUMS if re.fullmatch(r"rs/\w+_frac", name)])
def test_a_criterion_cannot_take_the_name_of_a_metric(metric: str) -> None:
    name = metric.removeprefix("rs/").removesuffix("_frac")
    for taken in (name, "veto", "veto_seq"):
        with pytest.raises(ConfigError, match=f"of {taken} is there twice"):
            RejectConfig(custom=[type(taken, (Veto,), {})()])
    assert RejectConfig(custom=[Veto(), type("Twice", (Veto,), {})()]).active() == ["Veto", "Twice"]


def cut(value: Any) -> Any:
    """What a class returns, each tensor without its last entry."""
    if isinstance(value, Tensor):
        return value[:-1]
    parts = [cut(part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def shortened(kind: Any) -> Any:
    """An instance of the class whose call loses the last entry."""

    def call(self: Any, *args: Any, **given: Any) -> Any:
        return cut(kind.__call__(self, *args, **given))

    return type(f"Short{kind.__name__}", (kind,), {"__call__": call})()


WRONG = {
    "level": lambda: correct(CustomConfig(level=shortened(Sequence)).spec(), tokens()),
    "bound": lambda: correct(CustomConfig(level=Level.token, bound=shortened(Truncate)).spec(), tokens()),
    "criterion": lambda: correct(CustomConfig(reject=RejectConfig(custom=[shortened(Veto)])).spec(), tokens()),
    "estimator": lambda: sample_advantages(shortened(Rloo), torch.ones(4), torch.zeros(4).long(), epsilon=1e-6),
    "aggregation": lambda: token_coefficients(
        shortened(MeanOfTokens), mask=MASK, cu_seqlens=CU, num_tokens=9, num_sequences=3, fixed_length_tokens=None
    ),
    "kl": lambda: reference_kl(
        tokens().train, ref_logprobs=tokens().train, anchor_logprobs=tokens().train, estimator=shortened(Unbiased)
    ),
    "loss": lambda: loss_of(shortened(Clip), correct(CustomConfig().spec(), tokens())),
    "metric": lambda: mismatch_stats(tokens(), metrics=[shortened(Gap)]),
}


def test_values_that_are_not_finite_name_the_class() -> None:
    @dataclass(kw_only=True)
    class Zero(CustomEstimator):
        def __call__(self, step: Any) -> Tensor:
            return step.rewards / 0  # type: ignore[no-any-return]

    @dataclass(kw_only=True)
    class Log(CustomLoss):
        def __call__(self, tokens: SurrogateTokens) -> Surrogate:
            return Clip()(tokens)._replace(loss=(tokens.ratio() - 1).log())

    with pytest.raises(ValueError, match="Zero must return finite values, and 4 of 4 are not"):
        sample_advantages(Zero(), torch.ones(4), torch.zeros(4).long(), epsilon=1e-6)
    with pytest.raises(ValueError, match="Log must return finite values"):
        loss_of(Log(), correct(CustomConfig().spec(), tokens()))


@dataclass(kw_only=True)
class Soft(CustomCriterion):
    def __call__(self, tokens: Tokens) -> Tensor:
        return torch.full_like(tokens.delta, 0.5)


@dataclass(kw_only=True)
class Elsewhere(CustomCriterion):
    def __call__(self, tokens: Tokens) -> Tensor:
        return tokens.valid.to("meta")


@dataclass(kw_only=True)
class Fixed(Clip):
    def __call__(self, tokens: SurrogateTokens) -> Surrogate:
        found = super().__call__(tokens)
        return found._replace(loss=found.loss.detach())


@dataclass(kw_only=True)
class Shares(Clip):
    def __call__(self, tokens: SurrogateTokens) -> Surrogate:
        return super().__call__(tokens)._replace(clipped_low=tokens.ratio().detach())


@dataclass(kw_only=True)
class Loud(CustomKLEstimator):
    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, anchor_logprobs: Tensor | None) -> Tensor:
        return (ref_logprobs - logprobs).detach()


@dataclass(kw_only=True)
class Zeroes(CustomCriterion):
    def __call__(self, tokens: Tokens) -> Tensor:
        tokens.delta.zero_()
        return tokens.valid


@dataclass(kw_only=True)
class Scales(Clip):
    def __call__(self, tokens: SurrogateTokens) -> Surrogate:
        tokens.advantages.mul_(0)
        return super().__call__(tokens)


@dataclass(kw_only=True)
class Shifts(CustomEstimator):
    def __call__(self, step: Any) -> Tensor:
        return step.deviation.add_(1)  # type: ignore[no-any-return]


@dataclass(kw_only=True)
class Leaves(CustomCriterion):
    def __call__(self, tokens: Tokens) -> Tensor:
        raise SystemExit(0)


@dataclass(kw_only=True)
class Writes(CustomMetric):
    def __call__(self, tokens: Tokens) -> Tensor:
        return tokens.delta.abs_()


def of_criterion(criterion: CustomCriterion) -> Correction:
    return correct(CustomConfig(reject=RejectConfig(custom=[criterion])).spec(), tokens())


def of_loss(config: Any) -> Tensor:
    return loss_of(config, correct(CustomConfig().spec(), tokens()))


UNFIT = {
    "Soft must return bool where it says which tokens, got torch.float32": lambda: of_criterion(Soft()),
    "Elsewhere must return values on cpu, got meta": lambda: of_criterion(Elsewhere()),
    "Fixed must return values with a gradient": lambda: of_loss(Fixed()),
    "Shares must return bool": lambda: of_loss(Shares()),
    "Loud must return values with a gradient": lambda: reference_kl(
        tokens().train.requires_grad_(), ref_logprobs=tokens().train, anchor_logprobs=None, estimator=Loud()
    ),
    "Zeroes must not change the tensors": lambda: of_criterion(Zeroes()),
    "Scales must not change the tensors": lambda: of_loss(Scales()),
    "Shifts must not change the tensors": lambda: sample_advantages(
        Shifts(), torch.ones(4), torch.zeros(4).long(), epsilon=1e-6
    ),
    "Writes must not change the tensors": lambda: mismatch_stats(tokens(), metrics=[Writes()]),
}


@pytest.mark.parametrize("said", UNFIT)
def test_what_does_not_fit_and_what_is_written_into_names_the_class(said: str) -> None:
    with pytest.raises(ValueError, match=said):
        UNFIT[said]()


def test_a_class_that_leaves_fails_like_any_other() -> None:
    with pytest.raises(RuntimeError, match=r"Leaves called sys\.exit\(0\)"):
        of_criterion(Leaves())


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_shape_names_the_class(kind: str) -> None:
    with pytest.raises(ValueError, match=r"^Short\w+ must return \[\d+\] values, got \[\d+\]$"):
        WRONG[kind]()
