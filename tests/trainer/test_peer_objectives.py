"""With a KL in the loss the presets have the gradients of verl and of TRL; skipped without requirements/bench.txt."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from algorithms.config import PRESETS, CustomConfig, KLEstimator, Level, PPOClipConfig, ReferenceKLConfig, TISConfig
from algorithms.config.correction import CorrectionConfig
from algorithms.config.spec import Bound, Compared
from trainer.config.train import TrainConfig
from trainer.policy.step import correction_counts, step_factor, step_loss

pytest.importorskip("verl")
pytest.importorskip("trl")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import peer_presets
from peer_batch import Batch, corrected
from peer_trl_trainer import score, trl_outcome
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

COEF = 0.1


def made(seed: int = 0) -> tuple[Batch, torch.Tensor]:
    torch.manual_seed(seed)
    batch = Batch.random(drift=0.15)
    return batch, batch.old + 0.2 * torch.randn_like(batch.old)


def ours(
    batch: Batch, reference: torch.Tensor, correction: CorrectionConfig, kl: KLEstimator, **loss: float
) -> torch.Tensor:
    """The gradient of Parity's optimizer step with respect to log pi_theta [B, L]."""
    config = object.__new__(TrainConfig)
    config.correction, config.loss = correction, PPOClipConfig(**loss)
    config.reference = ReferenceKLConfig(coef=COEF, estimator=kl, weighted=False)
    theta = batch.packed(batch.theta).clone().requires_grad_()
    current = correction.spec().compared is Compared.current
    applied = corrected(correction, batch, trainer=batch.theta if current else None)
    micro = SimpleNamespace(
        response_mask=batch.packed(batch.mask),
        cu_seqlens=batch.cu_seqlens,
        advantages=batch.packed(batch.advantages),
        ref_logprobs=batch.packed(reference),
    )
    mini = SimpleNamespace(num_response_tokens=int(batch.mask.sum()), num_sequences=len(batch.mask))
    scores = SimpleNamespace(logprobs=theta, entropy=None)
    step_loss(config, micro, scores, applied, mini=mini).loss.backward()  # type: ignore[arg-type]
    factor = step_factor(config, correction_counts(config, micro, applied), mini).gradient  # type: ignore[arg-type]
    assert theta.grad is not None
    return batch.padded(theta.grad) * factor


def same(theirs: torch.Tensor, found: torch.Tensor) -> bool:
    return bool((theirs - found).abs().max() <= 1e-6 * theirs.abs().max().clamp(min=1e-3)) and bool(found.any())


@pytest.mark.parametrize("name", [name for name in PRESETS if hasattr(RolloutCorrectionConfig, name)])
def test_a_preset_has_verls_gradient_with_kl_and_dual_clip(name: str) -> None:
    batch, reference = made()
    theirs = getattr(RolloutCorrectionConfig, name)()
    _, mask, policy = peer_presets._verl_preset(theirs, batch)
    counted = batch.float_mask if theirs.bypass_mode else mask
    theta = batch.theta.clone().requires_grad_()
    # As verl's ppo_loss composes it, with the mask and the count of the policy loss.
    kl = agg_loss(
        kl_penalty(theta, reference, "low_var_kl"), counted, "token-mean", batch_num_tokens=int(counted.sum())
    )
    (COEF * kl).backward()
    assert theta.grad is not None
    found = ours(batch, reference, PRESETS[name], KLEstimator.k3, dual_clip=peer_presets.DUAL_CLIP)
    assert same(policy.gradient + theta.grad, found)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_a_correction_of_trl_has_its_gradient_with_kl(mode: str) -> None:
    batch, reference = made()
    level, bound = Level[mode.split("_")[0]], Bound[mode.split("_")[1]]
    rewards = torch.randn(len(batch.mask))
    ratio = score(batch, rewards, vllm_importance_sampling_mode=mode)["importance_sampling_ratio"]
    theirs = trl_outcome(batch, reference=reference, beta=COEF, use_vllm=True, ratio=ratio)
    correction = (
        TISConfig(level=level, cap=3.0) if bound is Bound.truncate else CustomConfig(level=level, bound=bound, high=3.0)
    )
    assert same(theirs.gradient, ours(batch, reference, correction, KLEstimator.unbiased))
