"""The two parts of the mismatch: rounding of the weights for the engine, and arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from policy_cases import lone_worker, make_config, make_samples, save_policy
from test_packing import make_sample, pack_samples
from transformers import AutoModelForCausalLM

from rollout.config import DType, Quantization
from rollout.sglang.config import SGLangConfig
from rollout.torch.config import TorchEngineConfig
from rollout.types import Sample
from rollout.weights.quantization import held_weight
from trainer.batch.packing import micro_batch
from trainer.config.train import TrainConfig
from trainer.policy.held_weights import SCORED_TOKENS, _few_fresh, weights_differ

WEIGHTS, ARITHMETIC = "mismatch/k3_weights", "mismatch/k3_arithmetic"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


def config_of(model_path: Path, rollout: TorchEngineConfig, *, policy: DType = DType.float32) -> TrainConfig:
    config = make_config(model_path, num_workers=1)
    config.rollout = rollout
    config.policy.dtype = policy
    return config


def samples_of_engine(model_path: Path, rollout: TorchEngineConfig) -> list[Sample]:
    """Samples with the log-probs of an engine that holds rounded weights, and computes exactly."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    samples = make_samples()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(held_weight(name, parameter, rollout))
        for sample in samples:
            tokens = torch.from_numpy(sample.token_ids)
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)
            of_tokens = logprobs[:-1].gather(-1, tokens[1:, None])[:, 0]
            sample.rollout_logprobs[1:] = torch.where(torch.from_numpy(sample.response_mask)[1:], of_tokens, 0.0)
    return samples


def trained(
    config: TrainConfig, model_path: Path, samples: list[Sample]
) -> tuple[dict[str, float | None], list[bytes]]:
    """One step on one rank -> its metrics, and the bytes of every weight afterwards."""
    batch = pack_samples([samples], num_ranks=1, max_tokens=1000, policy_version=0)
    with lone_worker(config, model_path) as worker:
        with torch.no_grad():  # as the comparison of log-probs at every start: it leaves the root's weights gathered
            worker._policy.model(batch.ranks[0][0].micro_batches[0], temperature=1.0)
        report = worker.train(batch.ranks[0], batch.samples, 1)
        weights = [parameter.to_local().numpy().tobytes() for parameter in worker._policy.model.state_dict().values()]
    return report.metrics, weights


@pytest.mark.parametrize(
    "rollout",
    [
        TorchEngineConfig(dtype=DType.bfloat16),
        TorchEngineConfig(dtype=DType.float16),
        TorchEngineConfig(dtype=DType.float32, quantization=Quantization.int8),
        TorchEngineConfig(dtype=DType.bfloat16, quantization=Quantization.int4),
        TorchEngineConfig(dtype=DType.float32, quantization=Quantization.fp8),
    ],
    ids=lambda rollout: f"{rollout.dtype.name}-{rollout.quantization.name}",
)
def test_an_engine_that_only_rounds_its_weights_has_a_mismatch_of_weights_alone(
    model_path: Path, rollout: TorchEngineConfig
) -> None:
    samples = samples_of_engine(model_path, rollout)
    assert sum(len(sample.token_ids) for sample in samples) <= SCORED_TOKENS
    metrics, _ = trained(config_of(model_path, rollout), model_path, samples)
    k3, weights, arithmetic = metrics["mismatch/k3"], metrics[WEIGHTS], metrics[ARITHMETIC]
    assert weights == pytest.approx(k3, rel=1e-3)
    assert weights > 1e-10
    assert arithmetic < 1e-3 * weights


def test_an_engine_that_computes_differently_has_a_mismatch_of_arithmetic(model_path: Path) -> None:
    rollout = TorchEngineConfig(dtype=DType.bfloat16)
    samples = samples_of_engine(model_path, rollout)
    for sample in samples:
        sample.rollout_logprobs[sample.response_mask] -= 0.1
    metrics, _ = trained(config_of(model_path, rollout), model_path, samples)
    assert metrics[ARITHMETIC] == pytest.approx(torch.tensor(0.1).expm1().item() - 0.1, rel=0.01)
    assert metrics[WEIGHTS] < 1e-2 * metrics[ARITHMETIC]


def test_the_measurement_moves_no_bit_of_the_update(model_path: Path) -> None:
    samples = make_samples()
    plain, alone = trained(config_of(model_path, TorchEngineConfig(dtype=DType.float32)), model_path, samples)
    rounded = TorchEngineConfig(dtype=DType.bfloat16, quantization=Quantization.int4)
    measured, beside = trained(config_of(model_path, rounded), model_path, samples)
    assert plain[WEIGHTS] is plain[ARITHMETIC] is None
    assert measured[WEIGHTS] > 0
    assert beside == alone
    assert measured["loss/policy"] == plain["loss/policy"]


def test_only_responses_of_the_present_weights_are_scored(model_path: Path) -> None:
    rollout = TorchEngineConfig(dtype=DType.bfloat16)
    samples = samples_of_engine(model_path, rollout)
    for sample in samples[1:]:
        sample.rollout_logprobs[sample.response_mask] -= 3.0
        sample.token_versions[:] = -1
    metrics, _ = trained(config_of(model_path, rollout), model_path, samples)
    assert metrics["mismatch/k3"] > 1
    assert metrics[ARITHMETIC] < 1e-3 * metrics[WEIGHTS]
    for sample in samples:
        sample.token_versions[:] = -1
    assert trained(config_of(model_path, rollout), model_path, samples)[0][WEIGHTS] is None


@pytest.mark.parametrize(
    ("lengths", "lags", "scored"),
    [
        ([300, 50, 50, 50], [1, 0, 0, 0], [1, 2, 3]),
        ([100, 300, 100, 300, 50], [0, 2, 0, 1, 0], [0, 2, 4]),
        ([300, 50], [0, 0], [0]),  # one at least
        ([200, 90, 300, 40], [1, 1, 0, 0], [2]),
        ([100, 156, 10], [0, 0, 0], [0, 1]),  # exactly SCORED_TOKENS
        ([100, 200, 10], [0, 0, 0], [0]),
        ([10, 20], [3, 1], []),
    ],
)
def test_stale_responses_take_nothing_of_what_is_scored(lengths: list[int], lags: list[int], scored: list[int]) -> None:
    samples = [make_sample(index=i, prompt=2, response=length - 2) for i, length in enumerate(lengths)]
    assert _few_fresh(micro_batch(samples), torch.tensor(lags)) == scored


@pytest.mark.parametrize(
    ("policy", "rollout", "differ"),
    [
        (DType.float32, SGLangConfig(dtype=DType.bfloat16), True),
        (DType.float32, SGLangConfig(dtype=DType.float32), False),
        (DType.bfloat16, SGLangConfig(dtype=DType.bfloat16), False),
        (DType.bfloat16, SGLangConfig(dtype=DType.float32), False),
        (DType.bfloat16, SGLangConfig(dtype=DType.bfloat16, quantization=Quantization.int8), True),
    ],
)
def test_weights_are_compared_where_the_engine_rounds_and_the_trainer_does_not(
    model_path: Path, policy: DType, rollout: SGLangConfig, differ: bool
) -> None:
    config = make_config(model_path)
    config.rollout, config.policy.dtype = rollout, policy
    assert weights_differ(config) is differ
