"""Differentiating while scoring: which objectives allow it, and that it changes no gradient of a real FSDP2 rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from policy_cases import make_config, save_policy
from test_corrections import MODES, SURROGATES, gradient, near_policy

from algorithms.config import (
    CorrectionConfig,
    GSPOConfig,
    KLEstimator,
    LossConfig,
    PPOClipConfig,
    ReferenceKLConfig,
)
from algorithms.config.combine import is_token_local
from rollout.types import Sample
from trainer.config.train import TrainConfig
from trainer.policy import logprob_head
from trainer.policy import micro_loss as micro_loss_module
from trainer.policy import step_stats as step_totals_module
from trainer.policy import training_step as training_step_module
from trainer.policy.token_gradient import token_gradient

LOCAL = {
    "recompute",
    "ppo_is",
    "vanilla_is",
    "tis",
    "bypass",
    "bypass-reinforce",
    "disabled",
    "bypass_ppo_clip",
    "decoupled_token_is",
    "decoupled_token_icepop",
    "bypass_pg_token_icepop",
}
"""Of MODES, what weighs and judges tokens by themselves. The veto of MIS judges responses."""


@pytest.fixture(autouse=True)
def small_chunks_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head asks for the gradient whatever the size of a chunk."""
    monkeypatch.setattr(logprob_head, "MIN_AHEAD_LOGITS", 1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def samples(model_path: Path) -> list[Sample]:
    return near_policy(model_path)


def with_small_chunks(config: TrainConfig) -> TrainConfig:
    return replace(config, policy=replace(config.policy, logprob_chunk_tokens=7))


def fused_and_not(
    config: TrainConfig, model_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The gradient with and without differentiating while scoring, and the micro-batches that allowed it."""
    allowed: list[object] = []

    def counted(*args: object, **kwargs: object) -> object:
        result = token_gradient(*args, **kwargs)  # type: ignore[arg-type]
        if result is not None:
            allowed.append(result)
        return result

    config = with_small_chunks(config)
    with monkeypatch.context() as patch:
        patch.setattr(training_step_module, "token_gradient", counted)
        fused = gradient(config, model_path, samples, max_tokens=60)
        patch.setattr(training_step_module, "token_gradient", lambda *args, **kwargs: None)
        return fused, gradient(config, model_path, samples, max_tokens=60), len(allowed)


@pytest.mark.parametrize("name", MODES)
def test_only_objectives_of_single_tokens_are_local(name: str) -> None:
    assert set(MODES) >= LOCAL
    correction, loss = MODES[name], PPOClipConfig()
    assert is_token_local(correction, loss, is_corrected=False) == (name in LOCAL)
    assert is_token_local(correction, loss, is_corrected=True)
    assert not is_token_local(correction, GSPOConfig(), is_corrected=True)


@pytest.mark.parametrize("name", ["recompute", "tis", "mis", "mis-sequence", "bypass", "bypass-reinforce"])
def test_the_gradient_of_a_mode_is_the_same(
    model_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = make_config(model_path, num_workers=1, correction=MODES[name])
    fused, plain, allowed = fused_and_not(config, model_path, samples, monkeypatch)
    assert (allowed > 1) == (name in LOCAL)
    assert (fused - plain).norm() < 1e-6 * plain.norm()


@pytest.mark.parametrize("loss", [*SURROGATES, PPOClipConfig(entropy_coef=0.1)], ids=lambda loss: loss.surrogate)
def test_the_gradient_of_a_surrogate_is_the_same(
    model_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, loss: LossConfig
) -> None:
    config = make_config(model_path, num_workers=1, correction=MODES["tis"], loss=loss)
    fused, plain, allowed = fused_and_not(config, model_path, samples, monkeypatch)
    assert (allowed > 1) == (not isinstance(loss, GSPOConfig))
    assert (fused - plain).norm() < 1e-6 * plain.norm()


@pytest.mark.parametrize("mode", [MODES["tis"], MODES["bypass"]], ids=["tis", "bypass"])
def test_the_gradient_with_a_kl_to_the_reference_is_the_same(
    model_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, mode: CorrectionConfig
) -> None:
    reference = ReferenceKLConfig(coef=0.3, estimator=KLEstimator.unbiased)
    config = replace(make_config(model_path, num_workers=1, correction=mode), reference=reference)
    fused, plain, allowed = fused_and_not(config, model_path, samples, monkeypatch)
    assert allowed > 1
    assert (fused - plain).norm() < 1e-6 * plain.norm()


def test_a_pi_old_of_its_own_makes_weights_of_whole_responses_local(
    model_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With several optimizer steps pi_old has a forward of its own, and with it the weight of every response.
    config = make_config(model_path, num_workers=1, correction=MODES["mis-sequence"], mini_batch_prompts=2)
    assert config.needs_old_logprobs_pass
    fused, plain, allowed = fused_and_not(config, model_path, samples, monkeypatch)
    assert allowed > 1
    assert (fused - plain).norm() < 1e-6 * plain.norm()


def test_a_correction_by_a_stored_pi_old_is_computed_once(
    model_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(model_path, num_workers=1, correction=MODES["tis"], mini_batch_prompts=2)
    corrected: list[str] = []
    scored: list[object] = []

    def counted(name: str) -> Callable[..., object]:
        function = getattr(micro_loss_module, name)

        def call(*args: object, **kwargs: object) -> object:
            corrected.append(name)
            return function(*args, **kwargs)

        return call

    def counted_loss(*args: object, **kwargs: object) -> micro_loss_module.MicroLoss:
        scored.append(None)
        return micro_loss_module.micro_loss(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(micro_loss_module, "correct", counted("correct"))
    monkeypatch.setattr(step_totals_module, "micro_loss", counted_loss)
    gradient(with_small_chunks(config), model_path, samples, max_tokens=60)
    assert len(corrected) == len(scored) > 1
