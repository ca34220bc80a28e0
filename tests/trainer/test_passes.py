"""Passes over a rollout (`batch.passes`): the same updates as a loop by hand, pi_old and mismatch of the first pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policy_cases import MODES, full_gradient, lone_worker, make_config, make_samples, save_policy
from test_packing import pack_samples
from torch import Tensor
from transformers import AutoModelForCausalLM

from algorithms.config import (
    CorrectionConfig,
    RecomputeConfig,
    TISConfig,
)
from rollout.types import Sample
from trainer.batch.train_batch import RankMiniBatch, pass_order
from trainer.config.train import TrainConfig
from trainer.config.training import OptimConfig
from trainer.policy.step import TrainingStep
from trainer.policy.train_report import RankReport
from trainer.policy.trainable import MAX_CONSECUTIVE_BAD_STEPS
from trainer.policy.worker import PolicyWorker

OF_ALL_STEPS = ("mismatch/kept_frac", "mismatch/gradient_factor", "mismatch/is/norm_Z")
"""Means over all optimizer steps, those of later passes too."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


def near_samples() -> list[Sample]:
    """Samples whose log-probs are near those of a policy over 64 tokens that knows nothing, with rewards of both signs.

    The reward is the advantage.
    """
    samples = make_samples()
    for number, sample in enumerate(samples):
        sample.reward = float(5 * number % 3) - 0.9
        shift = (7 * number + 3 * np.arange(len(sample.response_mask))) % 5 - 2
        sample.rollout_logprobs = np.where(sample.response_mask, -4.16 + 0.1 * shift, 0.0)
    return samples


def config_of(
    model_path: Path, correction: CorrectionConfig, *, passes: int, mini_batches: int, **optim: float
) -> TrainConfig:
    config = make_config(model_path, num_workers=1, correction=correction)
    batch = replace(config.batch, passes=passes, mini_batch_prompts=4 // mini_batches)
    return replace(config, batch=batch, optim=OptimConfig(**({"lr": 1e-2} | optim)))  # type: ignore[arg-type]


def train(worker: PolicyWorker, config: TrainConfig, samples: Sequence[Sample], *, step: int = 1) -> RankReport:
    """One rollout step, in mini-batches of equal size and several micro-batches each."""
    size = len(samples) // config.batch.mini_batches
    minis = [samples[first : first + size] for first in range(0, len(samples), size)]
    batch = pack_samples(minis, num_ranks=1, max_tokens=30, policy_version=0)
    return worker.train(batch.ranks[0], batch.samples, step)


def weights_of(worker: PolicyWorker) -> Tensor:
    return torch.cat([parameter.full_tensor().detach().flatten() for parameter in worker._policy.model.parameters()])  # type: ignore[attr-defined]


def updates_of(worker: PolicyWorker) -> list[Tensor]:
    """All weights [P] after every update from now on, as a list that grows."""
    updates: list[Tensor] = []
    worker._policy._optimizer.register_step_post_hook(lambda *_: updates.append(weights_of(worker).clone()))
    return updates


def test_a_prompt_that_comes_twice_in_a_step_has_numbers_for_each_sample(model_path: Path) -> None:
    """With equal prompt_id and sample_index: the second group has other rewards and other log-probs."""
    first = near_samples()
    second = [replace(sample, reward=-(sample.reward or 0.0)) for sample in first]
    for sample in second:
        sample.rollout_logprobs = sample.rollout_logprobs * 1.1
    config = config_of(model_path, TISConfig(), passes=1, mini_batches=1)
    with lone_worker(config, model_path) as worker:
        report = train(worker, config, [*first, *second])
    numbers = list(range(2 * len(first)))
    assert sorted(report.sample_k3) == sorted(report.sample_advantages) == numbers
    assert [report.sample_advantages[n] for n in numbers] == pytest.approx([s.reward for s in (*first, *second)])
    assert all(report.sample_k3[n] != report.sample_k3[n + len(first)] for n in numbers[: len(first)])


# ---------------------------------------------------------------- the loop by hand


def scored_by_hand(model: Any, samples: Sequence[Sample]) -> Tensor:
    """log pi_theta of all response tokens, sample after sample."""
    parts = []
    for sample in samples:
        ids = torch.tensor(np.array(sample.token_ids))[None]
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        parts.append(logprobs[torch.from_numpy(np.array(sample.response_mask))[1:]])
    return torch.cat(parts)


def gradients_by_hand(
    model_path: Path, samples: Sequence[Sample], *, anchored_at_mu: bool, passes: int, lr: float
) -> list[Tensor]:
    """The gradient [P] of every pass: TIS with a cap of 2, or bypass; PPO-clip of 0.2; float64.

    Between the passes AdamW updates the weights, without clipping and weight decay.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    mu = torch.cat([torch.from_numpy(s.rollout_logprobs[np.array(s.response_mask)]) for s in samples])
    counts = torch.tensor([int(np.sum(sample.response_mask)) for sample in samples])
    advantages = torch.tensor([sample.reward for sample in samples], dtype=torch.float64).repeat_interleave(counts)
    with torch.no_grad():
        old = scored_by_hand(model, samples)
    anchor, weight = (mu, 1.0) if anchored_at_mu else (old, (old - mu).exp().clamp(max=2.0))
    found = []
    for _ in range(passes):
        optimizer.zero_grad()
        ratio = (scored_by_hand(model, samples) - anchor).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        (-(weight * surrogate).sum() / len(mu)).backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        optimizer.step()
    return found


@pytest.mark.parametrize("name", ["tis", "bypass"])
def test_two_passes_over_one_mini_batch_are_two_updates_of_a_loop_by_hand(model_path: Path, name: str) -> None:
    samples, lr = near_samples(), 3e-3
    by_hand = gradients_by_hand(model_path, samples, anchored_at_mu=name == "bypass", passes=2, lr=lr)
    config = config_of(model_path, MODES[name], passes=2, mini_batches=1, lr=lr, max_grad_norm=1e9, weight_decay=0.0)
    with lone_worker(config, model_path) as worker:
        report = train(worker, config, samples)
        found = full_gradient(worker._policy.model).double()
    assert report.num_optimizer_steps == 2 and (report.metrics["loss/clip_frac_low"] or 0) > 0.01
    assert (found - by_hand[1]).norm() <= 1e-5 * by_hand[1].norm()
    assert (found - by_hand[0]).norm() > 0.1 * by_hand[0].norm()


# ---------------------------------------------------------------- the first pass is a run without others


@pytest.mark.parametrize(("name", "mini_batches"), [*((name, 2) for name in MODES), ("tis", 1)])
def test_the_first_pass_is_bitwise_the_only_one_and_the_mismatch_is_measured_in_it_alone(
    model_path: Path, name: str, mini_batches: int
) -> None:
    samples, reports, updates = near_samples(), [], []
    for passes in (1, 3):
        config = config_of(model_path, MODES[name], passes=passes, mini_batches=mini_batches)
        with lone_worker(config, model_path) as worker:
            updates.append(updates_of(worker))
            reports.append(train(worker, config, samples))
    once, thrice = reports
    assert [len(each) for each in updates] == [mini_batches, 3 * mini_batches]
    for number in range(mini_batches):
        assert torch.equal(updates[0][number], updates[1][number])
    measured = {key: value for key, value in once.metrics.items() if key.startswith("mismatch/")}
    assert measured["mismatch/k3"] is not None
    for key in measured.keys() - set(OF_ALL_STEPS):
        assert thrice.metrics[key] == measured[key], key
    assert thrice.sample_k3 == once.sample_k3 and thrice.token_deltas.keys() == once.token_deltas.keys()
    assert thrice.histograms == once.histograms
    # The policy has moved, so what is about pi_theta differs.
    assert (thrice.metrics["loss/approx_kl"] or 0) != (once.metrics["loss/approx_kl"] or 0)


# ---------------------------------------------------------------- the order


def minis_of(count: int) -> list[RankMiniBatch]:
    return [RankMiniBatch(micro_batches=[], num_response_tokens=n, num_sequences=n) for n in range(count)]


def test_the_order_of_later_passes_is_drawn_from_seed_step_and_pass_alone() -> None:
    minis = minis_of(6)

    def order(number: int, *, seed: int = 0, step: int = 1) -> list[int]:
        return [mini.num_sequences for mini in pass_order(minis, number=number, seed=seed, step=step)]

    assert order(0) == order(0, seed=7, step=9) == list(range(6))
    drawn = [order(1), order(2), order(1, seed=1), order(1, step=2)]
    assert all(sorted(each) == list(range(6)) for each in drawn)
    assert len({tuple(each) for each in drawn}) == 4 and order(1) == drawn[0]


def test_a_rank_trains_in_that_order(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(model_path, RecomputeConfig(), passes=3, mini_batches=4)
    trained: list[tuple[int, int]] = []
    take_step = TrainingStep._optimizer_step

    def noted(step: TrainingStep, mini: RankMiniBatch, *, number: int, **options: Any) -> bool:
        trained.append((number, mini.micro_batches[0].sample_keys[0][0]))  # a mini-batch holds one prompt
        return take_step(step, mini, number=number, **options)

    monkeypatch.setattr(TrainingStep, "_optimizer_step", noted)
    with lone_worker(config, model_path) as worker:
        train(worker, config, near_samples(), step=5)
    order, expected = minis_of(4), []
    for number in range(3):
        order = pass_order(order, number=number, seed=config.run.seed, step=5)
        expected += [(number, mini.num_sequences) for mini in order]
    assert trained == expected


# ---------------------------------------------------------------- mini-batches without a usable gradient


def test_a_mini_batch_without_a_usable_gradient_is_left_out_of_later_passes_and_ends_no_run(model_path: Path) -> None:
    passes = MAX_CONSECUTIVE_BAD_STEPS + 1
    samples = near_samples()
    samples[0].reward = math.nan
    for mini_batches in (1, 2):
        config = config_of(model_path, TISConfig(), passes=passes, mini_batches=mini_batches)
        with lone_worker(config, model_path) as worker:
            report = train(worker, config, samples)
        taken = passes * (mini_batches - 1)
        assert report.num_optimizer_steps == taken
        assert report.metrics["optim/skipped_steps"] == passes * mini_batches - taken
        assert (0, 0) in report.bad_samples
