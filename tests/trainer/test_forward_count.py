"""What a mode costs, counted: forwards and backwards per token, for every mode, 1, 2 and 4 mini-batches, 1 to 3 passes.

In forward equivalents (a backward pass counts 2) the usual table is: 3 for what compares mu with the current policy,
otherwise 3 with one optimizer step per rollout and 4 with more; 4 where a denominator depends on the mask or on the
weights; 1 more with a reference. Two rows differ here. Denominators that depend on the batch need no forward of their
own, because the gradient is scaled once all micro-batches are in: 3 with one optimizer step. `ppo_is` pays 4 with more
than one step, for the metrics of all tokens; `bypass` with loss=ppo_clip is the same objective at 3. Each further pass
over the rollout costs 3: pi_old is scored once per rollout, and with one mini-batch the first pass scores it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from policy_cases import lone_worker, make_config, make_samples, save_policy
from test_packing import pack_samples

from algorithms.config import (
    AdvantageConfig,
    BaselineScope,
    BypassConfig,
    CorrectionConfig,
    KLEstimator,
    KLPlacement,
    MISConfig,
    PPOISConfig,
    RecomputeConfig,
    ReferenceKLConfig,
    RejectedDenominator,
    SelfNormalize,
    TISConfig,
    VanillaISConfig,
)
from trainer.batch.train_batch import MicroBatch, TrainBatch
from trainer.config.train import TrainConfig
from trainer.config.training import OptimConfig
from trainer.policy.step import TrainingStep
from trainer.policy.train_report import RankReport
from trainer.policy.worker import PolicyWorker
from trainer.scoring.forward import ScoringModel, TokenScores

COSTS: dict[str, tuple[CorrectionConfig, int, int]] = {
    "recompute": (RecomputeConfig(), 3, 4),
    "ppo_is": (PPOISConfig(), 3, 4),
    "vanilla_is": (VanillaISConfig(), 3, 4),
    "tis": (TISConfig(), 3, 4),
    "mis": (MISConfig(), 3, 4),
    "bypass": (BypassConfig(), 3, 3),
    "batch-normalised weights": (TISConfig(self_normalize=SelfNormalize.mean_one), 3, 4),
    "denominator of what is kept": (MISConfig(rejected_denominator=RejectedDenominator.drop), 3, 4),
}
"""Correction, forward equivalents per token of one pass with one mini-batch per rollout, and with more."""
HARDLY = OptimConfig(lr=1e-12)
"""The policy hardly moves: all tests share it."""


class Counter:
    """One rank with a policy and a reference that note the tokens of every forward and backward."""

    def __init__(self, worker: PolicyWorker) -> None:
        self._worker = worker
        self._reference = worker._reference
        self.forwards: list[int] = []
        self.backwards: list[int] = []
        assert self._reference is not None
        for model in (worker._policy.model, self._reference):
            model.register_forward_hook(self._count)

    def _count(self, module: ScoringModel, args: tuple[MicroBatch], scores: TokenScores) -> None:
        num_tokens = args[0].num_tokens
        self.forwards.append(num_tokens)
        if scores.logprobs.requires_grad:
            scores.logprobs.register_hook(lambda gradient: self.backwards.append(num_tokens))

    def train(self, config: TrainConfig, batch: TrainBatch) -> RankReport:
        """One rollout step under `config`; the counts begin anew."""
        self.forwards.clear()
        self.backwards.clear()
        reference = self._reference if config.has_reference else None
        worker = self._worker
        worker._training = TrainingStep(
            config, worker._policy, reference=reference, critic=worker._critic, device=worker._device
        )
        return self._worker.train(batch.ranks[0], batch.samples, 1)


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counter]:
    model_path = save_policy(tmp_path_factory.mktemp("model"))
    config = replace(make_config(model_path, num_workers=1), reference=ReferenceKLConfig(coef=0.1), optim=HARDLY)
    with lone_worker(config, model_path) as worker:
        yield Counter(worker)


def counted(config: TrainConfig, counter: Counter) -> tuple[float, float]:
    """Forwards and backwards per token of one rollout step, as the modules themselves saw them."""
    samples = make_samples()
    for sample in samples:
        # Near what a random policy over 64 tokens says, so that no correction rejects them.
        sample.rollout_logprobs = np.where(sample.response_mask, -math.log(64), 0.0)
    size = len(samples) // config.batch.mini_batches
    minis = [samples[first : first + size] for first in range(0, len(samples), size)]
    batch = pack_samples(minis, num_ranks=1, max_tokens=60, policy_version=0)
    report = counter.train(config, batch)
    assert report.num_optimizer_steps == config.batch.optimizer_steps_per_rollout
    assert len(counter.backwards) == config.batch.passes * sum(len(mini.micro_batches) for mini in batch.ranks[0])
    return sum(counter.forwards) / batch.stats.num_tokens, sum(counter.backwards) / batch.stats.num_tokens


def config_of(correction: CorrectionConfig, mini_batches: int, *, passes: int = 1) -> TrainConfig:
    config = make_config(Path("loaded already"), num_workers=1, correction=correction)
    return replace(config, batch=replace(config.batch, mini_batch_prompts=4 // mini_batches, passes=passes))


@pytest.mark.parametrize(("mini_batches", "passes"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("name", COSTS)
def test_forwards_and_backwards_of_every_mode(counter: Counter, name: str, mini_batches: int, passes: int) -> None:
    correction, once, more = COSTS[name]
    config = config_of(correction, mini_batches, passes=passes)
    expected = (once if mini_batches == 1 else more) + 3 * (passes - 1)
    forwards, backwards = counted(config, counter)
    assert backwards == passes
    assert forwards + 2 * backwards == expected
    assert config.forwards_per_token == expected


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("name", ["tis"])
def test_a_reference_costs_one_forward_more(counter: Counter, name: str, num_steps: int) -> None:
    correction, once, more = COSTS[name]
    config = replace(config_of(correction, num_steps), reference=ReferenceKLConfig(coef=0.1))
    forwards, backwards = counted(config, counter)
    assert forwards + 2 * backwards == (once if num_steps == 1 else more) + 1 == config.forwards_per_token


@pytest.mark.parametrize("num_steps", [1, 2])
def test_advantages_that_need_pi_old_cost_a_forward_also_in_a_single_step(counter: Counter, num_steps: int) -> None:
    kept = replace(config_of(MISConfig(), num_steps), advantage=AdvantageConfig(baseline_scope=BaselineScope.kept))
    in_reward = replace(
        config_of(TISConfig(), num_steps),
        reference=ReferenceKLConfig(coef=0.1, estimator=KLEstimator.k1, placement=KLPlacement.reward),
    )
    for config, expected in ((kept, 4), (in_reward, 5)):
        forwards, backwards = counted(config, counter)
        assert forwards + 2 * backwards == expected == config.forwards_per_token


def test_the_counter_sees_a_forward_that_should_not_be(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    # With the reuse of the training forward turned off, a single step costs 4.
    monkeypatch.setattr(TrainConfig, "needs_old_logprobs_pass", property(lambda config: True))
    forwards, _ = counted(config_of(TISConfig(), 1), counter)
    assert forwards == 2
