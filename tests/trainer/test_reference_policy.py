"""The KL to the frozen initial policy through a real FSDP2 rank: in the loss and in the reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from policy_cases import count_forwards, lone_worker, make_config, make_samples, save_policy
from test_packing import pack_samples

from algorithms.config import (
    AdvantageConfig,
    BypassConfig,
    CorrectionConfig,
    Estimator,
    KLEstimator,
    KLPlacement,
    MISConfig,
    ReferenceKLConfig,
    RejectedDenominator,
    SelfNormalize,
    TISConfig,
)
from algorithms.correction import correct
from rollout.types import Sample
from trainer.batch.train_batch import TokenScores, present
from trainer.config.train import TrainConfig
from trainer.policy.advantages import set_sample_advantages
from trainer.policy.held_weights import held_scores
from trainer.policy.step import step_loss
from trainer.policy.train_report import RankReport

IN_LOSS = [
    ReferenceKLConfig(coef=1.0, estimator=estimator)
    for estimator in (KLEstimator.k2, KLEstimator.k3, KLEstimator.unbiased)
]
IN_REWARD = ReferenceKLConfig(coef=1.0, estimator=KLEstimator.k1, placement=KLPlacement.reward)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


def config_with(
    model_path: Path, reference: ReferenceKLConfig, correction: CorrectionConfig | None = None
) -> TrainConfig:
    config = make_config(
        model_path,
        num_workers=1,
        correction=correction,
        advantage=AdvantageConfig(estimator=Estimator.reinforce),
    )
    return replace(config, reference=reference)


def on_policy(model_path: Path, reward: float) -> list[Sample]:
    """Samples whose log-probs are the policy's, all with one reward."""
    samples = make_samples()
    with lone_worker(make_config(model_path, num_workers=1), model_path) as worker:
        for sample in samples:
            [micro] = pack_samples([[sample]], num_ranks=1, max_tokens=1000, policy_version=0).ranks[0][0].micro_batches
            sample.rollout_logprobs = worker.logprobs([micro])[0].numpy()
            sample.reward = reward
    return samples


def steps(config: TrainConfig, model_path: Path, samples: Sequence[Sample], count: int) -> list[RankReport]:
    """`count` rollout steps of one policy on the same samples."""
    with lone_worker(config, model_path) as worker:
        return [
            worker.train(batch.ranks[0], batch.samples, step)
            for step in range(1, count + 1)
            for batch in [pack_samples([samples], num_ranks=1, max_tokens=30, policy_version=0)]
        ]


@pytest.mark.parametrize("reference", [*IN_LOSS, IN_REWARD], ids=lambda r: f"{r.estimator.name}-{r.placement.name}")
def test_the_first_step_stands_on_the_reference_and_later_ones_leave_it(
    model_path: Path, reference: ReferenceKLConfig
) -> None:
    reports = steps(config_with(model_path, reference), model_path, on_policy(model_path, 1.0), 3)
    k3 = [report.metrics["reference/k3"] for report in reports]
    assert k3[0] == pytest.approx(0.0, abs=1e-9)
    assert all(value is not None and value > 1e-6 for value in k3[1:])
    assert all(report.metrics["reference/invalid_tokens"] == 0 for report in reports)


@pytest.mark.parametrize("estimator", [KLEstimator.k2, KLEstimator.k3, KLEstimator.unbiased])
def test_a_larger_coefficient_holds_the_policy_closer(model_path: Path, estimator: KLEstimator) -> None:
    reached = []
    for coef in (1e-6, 100.0):
        config = config_with(model_path, ReferenceKLConfig(coef=coef, estimator=estimator))
        reached.append(steps(config, model_path, on_policy(model_path, 1.0), 6)[-1].metrics["reference/k3"])
    assert None not in reached
    assert reached[0] > 5 * reached[1], reached


def test_without_a_reference_nothing_is_loaded_or_measured(model_path: Path) -> None:
    [report] = steps(config_with(model_path, ReferenceKLConfig()), model_path, on_policy(model_path, 1.0), 1)
    assert not any(key.startswith("reference/") for key in report.metrics)


@pytest.mark.parametrize(("reference", "passes"), [(IN_LOSS[0], 1), (IN_REWARD, 2)], ids=["loss", "reward"])
def test_the_plan_counts_the_forwards(model_path: Path, reference: ReferenceKLConfig, passes: int) -> None:
    config = config_with(model_path, reference)
    batch = pack_samples([on_policy(model_path, 1.0)], num_ranks=1, max_tokens=30, policy_version=0)
    with lone_worker(config, model_path) as worker:
        tokens = count_forwards(worker)
        assert worker._reference is not None
        worker._reference.register_forward_pre_hook(lambda module, args: tokens.append(args[0].num_tokens))
        worker.train(batch.ranks[0], batch.samples, 1)
    assert sum(tokens) == (1 + passes) * batch.stats.num_tokens
    assert config.forwards_per_token == 3 + passes


def test_a_kl_in_the_reward_is_taken_off_before_the_advantage(model_path: Path) -> None:
    # REINFORCE: A = r - sum of k1, by hand from the log-probs of a policy that has moved away from the reference.
    samples = on_policy(model_path, 1.0)
    config = config_with(model_path, IN_REWARD)
    batch = pack_samples([samples], num_ranks=1, max_tokens=1000, policy_version=0)
    [micro] = batch.ranks[0][0].micro_batches
    with lone_worker(config, model_path) as worker:
        reference = worker.logprobs([micro])[0]
        worker.train(batch.ranks[0], batch.samples, 1)
        moved = worker.logprobs([micro])[0]
        minis = pack_samples([samples], num_ranks=1, max_tokens=1000, policy_version=1)
        mini = minis.ranks[0][0]
        assert worker._reference is not None
        worker._training.fill_old_logprobs([mini])
        worker._training.fill_ref_logprobs([mini], worker._reference)
        set_sample_advantages(config, [mini], minis.samples)
    starts = micro.cu_seqlens.tolist()
    for n in range(len(samples)):
        part = slice(starts[n], starts[n + 1])
        mask = micro.response_mask[part]
        penalty = (moved - reference)[part][mask].sum().item()
        assert abs(penalty) > 1e-3
        found = present(mini.micro_batches[0].advantages, "advantages")[part][mask]
        torch.testing.assert_close(found, torch.full_like(found, 1.0 - penalty), rtol=1e-4, atol=1e-5)


def test_combinations_without_effect_are_refused(model_path: Path) -> None:
    with pytest.raises(ValueError, match=r"reference\.placement must be loss: .* correction=bypass"):
        config_with(model_path, IN_REWARD, BypassConfig())
    with pytest.raises(ValueError, match=r"reference\.coef must be 0 in the loss of self-normalised weights"):
        config_with(model_path, IN_LOSS[0], TISConfig(self_normalize=SelfNormalize.mean_one))
    with pytest.raises(ValueError, match=r"weighted has no effect with placement=reward"):
        replace(IN_REWARD, weighted=False)
    config_with(model_path, IN_REWARD, TISConfig(self_normalize=SelfNormalize.mean_one))
    config_with(model_path, IN_LOSS[0], BypassConfig())


@pytest.mark.parametrize(("weighted", "denominator"), [(True, "keep"), (False, "keep"), (False, "drop")])
def test_a_rejected_token_comes_back_through_an_unweighted_kl_alone(
    model_path: Path, weighted: bool, denominator: str
) -> None:
    # log mu = -12 of a token with pi = 0.5: rho is 81,000, and an unbounded pi_theta / mu would own the gradient.
    kl = ReferenceKLConfig(coef=0.01, weighted=weighted)
    config = config_with(model_path, kl, MISConfig(rejected_denominator=RejectedDenominator[denominator]))
    samples = make_samples()[:1]
    first = samples[0].num_prompt_tokens
    pi = math.log(0.5)
    samples[0].rollout_logprobs = np.where(samples[0].response_mask, pi - 0.5, 0.0)  # a weight of 1.65
    samples[0].rollout_logprobs[first] = -12.0
    samples[0].reward = 0.0
    [mini] = pack_samples([samples], num_ranks=1, max_tokens=1000, policy_version=0).ranks[0]
    [micro] = mini.micro_batches
    micro.ref_logprobs = torch.where(micro.response_mask, math.log(0.25), 0.0)
    micro.advantages = torch.zeros_like(micro.ref_logprobs)
    logprobs = torch.where(micro.response_mask, pi, 0.0).requires_grad_()
    scores = TokenScores(logprobs=logprobs, entropy=torch.zeros_like(logprobs), floor_delta=None)
    correction = correct(config.correction.spec(), micro.tokens(logprobs.detach()))
    step_loss(config, micro, scores, correction, mini=mini).loss.backward()
    assert logprobs.grad is not None
    # k3 x pi_theta / pi_old at L = log 2: k3 + its derivative = (exp(-L) - 1 + L) + (1 - exp(-L)) = L.
    weight = math.exp(0.5) if weighted else 1.0
    expected = torch.full_like(logprobs, weight * 0.01 * math.log(2) / int(micro.response_mask.sum()))
    expected[~micro.response_mask] = 0
    if weighted or denominator == "drop":
        expected[first] = 0
    torch.testing.assert_close(logprobs.grad, expected)


def test_every_scoring_is_at_the_sampling_temperature(model_path: Path) -> None:
    """pi_old, pi_ref and the weights that the engines hold, here those of the trainer: one model, one temperature."""
    config = config_with(model_path, IN_LOSS[0])
    config.sampling.temperature = 0.5
    batch = pack_samples([make_samples()], num_ranks=1, max_tokens=1000, policy_version=0)
    [micro] = batch.ranks[0][0].micro_batches
    with lone_worker(config, model_path) as worker:
        [expected], [plain] = worker.logprobs([micro], 0.5), worker.logprobs([micro], 1.0)
        worker._training.fill_old_logprobs(batch.ranks[0])
        assert worker._reference is not None
        worker._training.fill_ref_logprobs(batch.ranks[0], worker._reference)
        lags = batch.samples.lags[micro.sample_numbers]
        held = held_scores(worker._policy.model, micro, lags, config=config)
        [by_default] = worker.logprobs([micro])
    assert (expected - plain).abs().max() > 1e-3
    for found in (present(micro.old_logprobs, "old"), present(micro.ref_logprobs, "ref"), by_default):
        assert torch.equal(found, expected)
    assert len(held.places) and torch.allclose(held.logprobs, expected[held.places], atol=1e-6)
