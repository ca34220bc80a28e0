"""float16: the same gradient as float32, overflows that are skipped and counted, a scale that a checkpoint keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from policy_cases import lone_worker, make_config, make_samples, save_policy
from test_packing import pack_samples
from torch.distributed.tensor import DTensor

from rollout.config import DType
from trainer.config.train import TrainConfig
from trainer.policy.optimizer import BACKOFF, GROWTH, GROWTH_INTERVAL, INITIAL_SCALE, LossScale
from trainer.policy.train_report import RankReport
from trainer.policy.worker import PolicyWorker


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


def config_of(model_path: Path, dtype: DType) -> TrainConfig:
    config = make_config(model_path, num_workers=1)
    return replace(config, policy=replace(config.policy, dtype=dtype), optim=replace(config.optim, max_grad_norm=1e9))


def step(worker: PolicyWorker, number: int = 1, *, advantage: float = 1.0) -> RankReport:
    """One optimizer step over two micro-batches."""
    samples = make_samples()
    for sample in samples:
        assert sample.reward is not None
        sample.reward *= advantage
    batch = pack_samples([samples], num_ranks=1, max_tokens=80, policy_version=0)
    assert len(batch.ranks[0][0].micro_batches) > 1
    return worker.train(batch.ranks[0], batch.samples, number)


def save(worker: PolicyWorker, path: Path) -> None:
    worker.save_checkpoint(path, False)
    report = worker.saved_checkpoint(True)
    assert report is not None and report.error is None


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([(t.full_tensor() if isinstance(t, DTensor) else t).detach().flatten() for t in tensors]).clone()


def weights(worker: PolicyWorker) -> torch.Tensor:
    return flat(list(worker._policy.model.parameters()))


def gradient(model_path: Path, dtype: DType, *, advantage: float, scale: float | None = None) -> torch.Tensor:
    with lone_worker(config_of(model_path, dtype), model_path) as worker:
        if scale is not None:
            assert worker._policy._scale is not None
            worker._policy._scale.value = scale
        step(worker, advantage=advantage)
        return flat([p.grad for p in worker._policy.model.parameters() if p.grad is not None])


@pytest.mark.parametrize("advantage", [1.0, 1e-4])
def test_float16_has_the_gradient_of_float32(model_path: Path, advantage: float) -> None:
    exact = gradient(model_path, DType.float32, advantage=advantage)
    scaled = gradient(model_path, DType.float16, advantage=advantage)
    assert (scaled - exact).norm() <= 1e-2 * exact.norm()


def test_small_gradients_vanish_without_the_scale(model_path: Path) -> None:
    exact = gradient(model_path, DType.float32, advantage=1e-4)
    unscaled = gradient(model_path, DType.float16, advantage=1e-4, scale=1.0)
    assert (unscaled - exact).norm() > 0.1 * exact.norm()


def test_an_overflow_is_skipped_and_counted_and_ends_no_run(model_path: Path) -> None:
    with lone_worker(config_of(model_path, DType.float16), model_path) as worker:
        assert worker._policy._scale is not None
        worker._policy._scale.value = 2.0**60
        before = weights(worker)
        for number in range(1, 6):
            report = step(worker, number)
            assert report.num_optimizer_steps == 0
            assert report.metrics["optim/overflow_steps"] == report.metrics["optim/skipped_steps"] == 1.0
            assert report.metrics["optim/loss_scale"] == 2.0**60 * BACKOFF**number
            assert report.metrics["optim/grad_norm"] is None
        assert torch.equal(weights(worker), before)
        worker._policy._scale.value = INITIAL_SCALE
        report = step(worker, 6)
        assert (report.num_optimizer_steps, report.metrics["optim/overflow_steps"]) == (1, 0.0)
        assert not torch.equal(weights(worker), before)


def test_a_gradient_that_is_not_finite_at_the_floor_ends_the_run(model_path: Path, tmp_path: Path) -> None:
    """A resumed run goes on with the count."""
    refused = pytest.raises(
        RuntimeError,
        match=r"3 optimizer steps of the policy in a row had a non-finite gradient norm; lower optim\.lr or set",
    )
    with lone_worker(config_of(model_path, DType.float16), model_path) as worker:
        assert worker._policy._scale is not None
        worker._policy._scale.value = 4.0
        for number in range(1, 5):  # two overflows down to the floor, then two bad steps
            step(worker, number, advantage=float("inf"))
        save(worker, tmp_path / "bad")
        with refused:
            step(worker, 5, advantage=float("inf"))
    with lone_worker(config_of(model_path, DType.float16), model_path) as worker:
        worker.load_checkpoint(tmp_path / "bad", 4)
        with refused:
            step(worker, 5, advantage=float("inf"))


def test_the_scale_grows_and_returns_from_a_checkpoint(model_path: Path, tmp_path: Path) -> None:
    with lone_worker(config_of(model_path, DType.float16), model_path) as worker:
        assert worker._policy._scale is not None
        worker._policy._scale.load(torch.tensor([1024.0, GROWTH_INTERVAL - 1]))
        step(worker)
        assert worker._policy.loss_scale == 1024.0 * GROWTH
        step(worker, 2)
        save(worker, tmp_path / "half")
    with lone_worker(config_of(model_path, DType.float16), model_path) as worker:
        assert worker._policy._scale is not None
        worker.load_checkpoint(tmp_path / "half", 1)
        assert worker._policy._scale.state().tolist() == [2048.0, 1.0]


def test_a_checkpoint_of_float32_changes_no_scale(model_path: Path, tmp_path: Path) -> None:
    with lone_worker(config_of(model_path, DType.float32), model_path) as worker:
        report = step(worker)
        assert worker._policy.loss_scale is None
        assert "optim/loss_scale" not in report.metrics
        save(worker, tmp_path / "single")
    with lone_worker(config_of(model_path, DType.float16), model_path) as worker:
        worker.load_checkpoint(tmp_path / "single", 1)
        assert worker._policy.loss_scale == INITIAL_SCALE


def test_the_numbers_are_those_of_torch() -> None:
    theirs, ours = torch.amp.GradScaler("cpu"), LossScale()
    assert ours.value == theirs.get_scale()
    assert (theirs.get_growth_factor(), theirs.get_backoff_factor()) == (GROWTH, BACKOFF)
    assert theirs.get_growth_interval() == GROWTH_INTERVAL
