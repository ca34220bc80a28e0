"""Every correction, preset and surrogate through a real FSDP2 rank: forwards, statistics, and gradients that do not
depend on how samples were packed, also where rejection or self-normalisation decides what divides them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from policy_cases import (
    by_aggregation,
    count_forwards,
    full_gradient,
    lone_worker,
    make_config,
    make_samples,
    save_policy,
)
from test_packing import pack_samples

from algorithms.config import (
    PRESETS,
    AdvantageConfig,
    Aggregation,
    BaselineScope,
    BypassConfig,
    BypassLoss,
    CISPOConfig,
    CorrectionConfig,
    DPPOKLConfig,
    DPPOTVConfig,
    Estimator,
    GSPOConfig,
    Level,
    LossConfig,
    MISConfig,
    PPOISConfig,
    RecomputeConfig,
    ReinforceConfig,
    RejectConfig,
    RejectedDenominator,
    SAPOConfig,
    SelfNormalize,
    TISConfig,
    VanillaISConfig,
)
from rollout.types import Sample
from trainer.config.train import TrainConfig
from trainer.policy.step import MAX_REJECTED_STEPS
from trainer.policy.train_report import RankReport
from trainer.policy.worker import PolicyWorker

MODES: dict[str, CorrectionConfig] = {
    "recompute": RecomputeConfig(),
    "ppo_is": PPOISConfig(),
    "vanilla_is": VanillaISConfig(),
    "tis": TISConfig(),
    "tis-prefix": TISConfig(level=Level.prefix),
    "tis-segment": TISConfig(level=Level.segment),
    "mis": MISConfig(),
    "mis-drop": MISConfig(rejected_denominator=RejectedDenominator.drop),
    "mis-sequence": MISConfig(level=Level.sequence),
    "bypass": BypassConfig(),
    "bypass-reinforce": BypassConfig(loss=BypassLoss.reinforce),
    **PRESETS,
}
SURROGATES: list[LossConfig] = [
    GSPOConfig(),
    CISPOConfig(),
    ReinforceConfig(),
    DPPOTVConfig(),
    DPPOKLConfig(),
    SAPOConfig(),
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


def near_policy(model_path: Path) -> list[Sample]:
    """`make_samples` with log-probs that lie within 0.3 nats of the policy's, some on each side, one far away."""
    samples = make_samples()
    with lone_worker(make_config(model_path, num_workers=1), model_path) as worker:
        [micro] = pack_samples([samples], num_ranks=1, max_tokens=1000, policy_version=0).ranks[0][0].micro_batches
        [logprobs] = worker.logprobs([micro])
        starts = micro.cu_seqlens.tolist()
        scored = {key: logprobs[starts[n] : starts[n + 1]].tolist() for n, key in enumerate(micro.sample_keys)}
    for number, sample in enumerate(samples):
        own = np.array(scored[sample.prompt_id, sample.sample_index])
        shift = 0.3 * np.sin(7.0 * number + 1.3 * np.arange(len(own)))
        sample.rollout_logprobs = np.where(sample.response_mask, np.minimum(own + shift, 0.0), 0.0)
        sample.reward = float((number * 5) % 3)
    first = samples[0].num_prompt_tokens
    samples[0].rollout_logprobs[first] -= 3.0  # rho = 20: beyond every bound
    return samples


def train(
    config: TrainConfig, model_path: Path, minis: Sequence[Sequence[Sample]], *, max_tokens: int = 1000
) -> tuple[RankReport, PolicyWorker]:
    """One rollout step of a fresh policy."""
    batch = pack_samples(minis, num_ranks=1, max_tokens=max_tokens, policy_version=0)
    with lone_worker(config, model_path) as worker:
        report = worker.train(batch.ranks[0], batch.samples, 1)
    return report, worker


def gradient(config: TrainConfig, model_path: Path, samples: Sequence[Sample], *, max_tokens: int) -> torch.Tensor:
    """Gradient [P] of one optimizer step over all parameters; clipping is off."""
    config = replace(config, optim=replace(config.optim, max_grad_norm=1e9))
    _, worker = train(config, model_path, [samples], max_tokens=max_tokens)
    return full_gradient(worker._policy.model)


@pytest.mark.parametrize("mini_batch_prompts", [None, 2])
@pytest.mark.parametrize("name", MODES)
def test_every_mode_and_preset_trains_and_pays_the_planned_forwards(
    model_path: Path, name: str, mini_batch_prompts: int | None
) -> None:
    samples = near_policy(model_path)
    minis = [samples] if mini_batch_prompts is None else [samples[:8], samples[8:]]
    config = make_config(model_path, num_workers=1, correction=MODES[name], mini_batch_prompts=mini_batch_prompts)
    batch = pack_samples(minis, num_ranks=1, max_tokens=30, policy_version=0)
    with lone_worker(config, model_path) as worker:
        tokens = count_forwards(worker)
        report = worker.train(batch.ranks[0], batch.samples, 1)
    # A forward counts 1 and a backward 2, so the training forward is one of three.
    assert sum(tokens) == batch.stats.num_tokens * (config.forwards_per_token - 2)
    metrics = report.metrics
    k3, floor, kept = metrics["mismatch/k3"], metrics["mismatch/k3_floor"], metrics["mismatch/kept_frac"]
    assert k3 is not None and 1e-3 < k3 < 1 and floor is not None and 0 < floor < 1e-10
    # Bounds of 0.1 % on geometric means and of 0.01 on mean K3 reject most of these samples.
    strict = "geo_rs" in name or "k3_rs" in name
    assert kept is not None and (kept < 0.5 if strict else kept > 0.5)
    assert strict or report.num_optimizer_steps == len(minis)
    assert all(value is None or math.isfinite(value) for value in metrics.values()), metrics


def test_every_mode_measures_the_same_mismatch(model_path: Path) -> None:
    samples = near_policy(model_path)
    seen = {
        name: train(make_config(model_path, num_workers=1, correction=mode), model_path, [samples])[0]
        for name, mode in MODES.items()
    }
    for metric in ("mismatch/k1", "mismatch/k3", "mismatch/k3_max", "mismatch/ess/raw_token", "mismatch/chi2_token"):
        values = [report.metrics[metric] for report in seen.values()]
        assert None not in values
        assert max(values) == pytest.approx(min(values), rel=1e-9), metric


@pytest.mark.parametrize("loss", SURROGATES, ids=lambda loss: loss.surrogate)
def test_every_surrogate_trains(model_path: Path, loss: LossConfig) -> None:
    samples = near_policy(model_path)
    config = make_config(model_path, num_workers=1, loss=loss, mini_batch_prompts=2)
    report, _ = train(config, model_path, [samples[:8], samples[8:]])
    assert report.num_optimizer_steps == 2
    assert report.metrics["optim/grad_norm"] is not None and report.metrics["optim/grad_norm"] > 0


DIVIDED: dict[str, CorrectionConfig] = {
    "drop": MISConfig(low=0.8, high=1.25, reject=RejectConfig(), rejected_denominator=RejectedDenominator.drop),
    "normalised tokens": TISConfig(self_normalize=SelfNormalize.mean_one),
    "normalised responses": TISConfig(level=Level.sequence, self_normalize=SelfNormalize.mean_one),
    "miles": PRESETS["miles_default"],
}


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("aggregation", Aggregation)
def test_what_rejection_and_weights_divide_does_not_depend_on_packing(
    model_path: Path, name: str, aggregation: Aggregation
) -> None:
    samples = near_policy(model_path)
    config = make_config(model_path, num_workers=1, correction=DIVIDED[name], loss=by_aggregation(aggregation))
    whole = gradient(config, model_path, samples, max_tokens=1000)
    parts = gradient(config, model_path, samples[::-1], max_tokens=20)
    assert whole.norm() > 1e-4
    assert (whole - parts).norm() <= 1e-5 * whole.norm()


@pytest.mark.parametrize("aggregation", Aggregation)
def test_dropping_rejected_tokens_is_leaving_them_out_of_the_batch(model_path: Path, aggregation: Aggregation) -> None:
    # Whole responses are rejected, so the same gradient comes from a batch that never had them.
    correction = MISConfig(
        level=Level.sequence, low=0.9, high=1.1, reject=RejectConfig(), rejected_denominator=RejectedDenominator.drop
    )
    samples = near_policy(model_path)
    config = make_config(model_path, num_workers=1, correction=correction, loss=by_aggregation(aggregation))
    whole = gradient(config, model_path, samples, max_tokens=1000)
    kept = [sample for sample in samples if 0.9 <= product_of_ratios(model_path, sample) <= 1.1]
    assert 1 < len(kept) < len(samples) - 1
    alone = gradient(config, model_path, kept, max_tokens=1000)
    assert (whole - alone).norm() <= 1e-5 * alone.norm()


def product_of_ratios(model_path: Path, sample: Sample) -> float:
    """pi_old / mu of the whole response."""
    with lone_worker(make_config(model_path, num_workers=1), model_path) as worker:
        [micro] = pack_samples([[sample]], num_ranks=1, max_tokens=1000, policy_version=0).ranks[0][0].micro_batches
        [logprobs] = worker.logprobs([micro])
    return float((logprobs - micro.rollout_logprobs)[micro.response_mask].sum().exp())


def test_self_normalisation_divides_loss_and_gradient_by_the_mean_weight(model_path: Path) -> None:
    samples = near_policy(model_path)
    plain = make_config(model_path, num_workers=1, correction=TISConfig())
    normalised = make_config(model_path, num_workers=1, correction=TISConfig(self_normalize=SelfNormalize.mean_one))
    report, _ = train(normalised, model_path, [samples])
    z, scale = report.metrics["mismatch/is/norm_Z"], report.metrics["mismatch/gradient_factor"]
    assert z is not None and abs(z - 1) > 1e-3
    assert scale == pytest.approx(1 / z)
    one = gradient(plain, model_path, samples, max_tokens=1000)
    other = gradient(normalised, model_path, samples, max_tokens=1000)
    torch.testing.assert_close(other * z, one, rtol=1e-5, atol=1e-9)
    before, _ = train(plain, model_path, [samples])
    assert report.metrics["loss/policy"] == pytest.approx(before.metrics["loss/policy"] / z, rel=1e-6)


@pytest.mark.parametrize("estimator", [Estimator.rloo, Estimator.reinforce_pp_baseline])
def test_the_baseline_of_what_is_kept_forgets_rejected_responses(model_path: Path, estimator: Estimator) -> None:
    # The first response is vetoed; under `kept` its reward must not matter to the others.
    correction = MISConfig(low=0.3, high=4.0, reject=RejectConfig(max_k3=1.0))
    gradients = {}
    for scope in BaselineScope:
        for reward in (0.0, 50.0):
            samples = near_policy(model_path)
            samples[0].reward = reward
            config = make_config(
                model_path,
                num_workers=1,
                correction=correction,
                advantage=AdvantageConfig(estimator=estimator, baseline_scope=scope),
            )
            gradients[scope, reward] = gradient(config, model_path, samples, max_tokens=20)
    assert torch.equal(gradients[BaselineScope.kept, 0.0], gradients[BaselineScope.kept, 50.0])
    assert gradients[BaselineScope.kept, 0.0].norm() > 1e-4


def test_a_baseline_of_what_is_kept_costs_a_forward_and_all_does_not(model_path: Path) -> None:
    for scope, forwards in ((BaselineScope.all, 3), (BaselineScope.kept, 4)):
        config = make_config(
            model_path,
            num_workers=1,
            correction=MISConfig(),
            advantage=AdvantageConfig(baseline_scope=scope),
        )
        assert config.forwards_per_token == forwards


@pytest.mark.scenario(26)
def test_a_run_whose_tokens_are_all_rejected_again_and_again_is_ended(model_path: Path, tmp_path: Path) -> None:
    """A step with a kept token begins the count anew; a resumed run goes on with it."""
    near = near_policy(model_path)
    far = make_samples()
    for sample in far:  # rho is beyond every bound
        sample.rollout_logprobs = np.where(sample.response_mask, -30.0, 0.0)
    config = make_config(model_path, num_workers=1, correction=MISConfig())
    almost = MAX_REJECTED_STEPS - 1

    def skipped(worker: PolicyWorker, samples: Sequence[Sample]) -> float | None:
        batch = pack_samples([samples], num_ranks=1, max_tokens=1000, policy_version=0)
        return worker.train(batch.ranks[0], batch.samples, 1).metrics["optim/skipped_steps"]

    with lone_worker(config, model_path) as worker:
        assert [skipped(worker, far) for _ in range(almost)] == [1.0] * almost
        assert skipped(worker, near) == 0.0
        assert [skipped(worker, far) for _ in range(almost)] == [1.0] * almost
        worker.save_checkpoint(tmp_path / "saved", asynchronous=False)
        with pytest.raises(RuntimeError, match=f"every token of {MAX_REJECTED_STEPS} optimizer steps in a row"):
            skipped(worker, far)
        # Earlier versions did not save the count.
        worker._shards.save({"policy": worker._policy.state_dict()}, tmp_path / "earlier", asynchronous=False)
    with lone_worker(config, model_path) as worker:
        assert worker.load_checkpoint(tmp_path / "saved", 1)
        with pytest.raises(RuntimeError, match=f"every token of {MAX_REJECTED_STEPS} optimizer steps in a row"):
            skipped(worker, far)
        assert worker.load_checkpoint(tmp_path / "earlier", 1)
        assert skipped(worker, far) == 1.0
