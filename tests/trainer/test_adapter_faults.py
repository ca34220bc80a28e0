"""Adapters that are dropped, old, mixed up or wrongly scaled by the sender, on the way or in the engine start no run.

60 trials: four faults x three places x five draws of what is faulty, with a real rank and a real embedded engine. The
first draw spoils the whole adapter, the others a single tensor of it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import rank_and_engine, start_run
from policy_cases import make_config, save_policy
from torch import Tensor

import trainer.policy.publisher
from rollout.config import DType, Quantization
from rollout.engine import WeightSyncError
from rollout.torch.config import TorchEngineConfig
from rollout.types import PackedWeights, SharedWeights
from rollout.weights.adapter import is_adapter, sent_name
from rollout.weights.packed_weights import DTYPES
from rollout.weights.shared_weights import DATA_START, copy_of
from trainer.config.train import TrainConfig
from trainer.config.training import LoraConfig
from trainer.policy.lora import Part
from trainer.run.probe import ProbeError

FAULTS = ("dropped", "old", "mixed", "scaled")
SCALE = 2.0
"""alpha / rank of the runs."""
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


def make_run(
    model_path: Path,
    *,
    dtype: DType = DType.float32,
    quantization: Quantization = Quantization.none,
    targets: str = "all",
    seed: int = 0,
) -> TrainConfig:
    config = make_config(model_path, num_workers=1)
    lora = LoraConfig(rank=4, alpha=8, targets=targets)
    return replace(
        config,
        run=replace(config.run, seed=seed),
        rollout=TorchEngineConfig(dtype=dtype, quantization=quantization),
        policy=replace(config.policy, lora=lora, dtype=dtype),
    )


class Fault:
    """Spoils adapters that it sees one after the other."""

    def __init__(self, kind: str, draw: int) -> None:
        self._kind, self._draw = kind, draw
        self._before: Tensors = {}

    def of(self, tensors: Tensors) -> Tensors:
        """The spoiled adapter; the tensors that are not faulty are the same."""
        draw = random.Random(self._draw)
        chosen = [name for name in tensors if ".lora_B." in name]
        if self._draw:
            chosen = [draw.choice(sorted(tensors))]
        before, self._before = self._before or tensors, {name: each.clone() for name, each in tensors.items()}
        spoiled = dict(tensors)
        for name in chosen:
            if self._kind == "dropped":
                spoiled[name] = torch.zeros_like(tensors[name])
            elif self._kind == "old":
                spoiled[name] = before[name]
            elif self._kind == "scaled":
                spoiled[name] = tensors[name] * SCALE
            else:
                like = [other for other in tensors if other != name and tensors[other].shape == tensors[name].shape]
                other = draw.choice(sorted(like))
                spoiled[name], spoiled[other] = tensors[other], tensors[name]
        return spoiled


def in_the_sender(monkeypatch: pytest.MonkeyPatch, fault: Fault, engines: Any) -> None:
    """The rank publishes, and digests, another adapter than the one it trains."""
    gathered = trainer.policy.publisher.full_tensors

    def spoiled(model: Any, dtypes: Any, part: Part) -> Iterator[tuple[str, Tensor]]:
        tensors = gathered(model, dtypes, part)
        return iter(fault.of(dict(tensors)).items()) if part is Part.adapter else tensors

    monkeypatch.setattr(trainer.policy.publisher, "full_tensors", spoiled)


def on_the_way(monkeypatch: pytest.MonkeyPatch, fault: Fault, engines: Any) -> None:
    """The bytes in shared memory change after they were digested."""
    load = engines.load

    def spoiled(shared: SharedWeights) -> Any:
        descriptor = os.open(shared.address.path, os.O_RDWR)
        for spec, tensor in unpacked(copy_of(shared), fault):
            os.pwrite(descriptor, tensor.contiguous().view(torch.uint8).numpy().tobytes(), DATA_START + spec.offset)
        os.close(descriptor)
        return load(shared)

    monkeypatch.setattr(engines, "load", spoiled)


def unpacked(weights: PackedWeights, fault: Fault) -> Iterator[tuple[Any, Tensor]]:
    flat = torch.from_numpy(weights.data)
    own = {
        spec.name: flat[spec.offset : spec.offset + spec.num_bytes].view(DTYPES[spec.dtype]).view(spec.shape)
        for spec in weights.tensors
    }
    spoiled = fault.of({name: each.clone() for name, each in own.items()})
    return ((spec, spoiled[spec.name]) for spec in weights.tensors)


def in_the_engine(monkeypatch: pytest.MonkeyPatch, fault: Fault, engines: Any) -> None:
    """The engine verifies the adapter, says so, and then samples with another one."""
    engine = engines.engine
    load = engine.load_weights

    def spoiled(weights: PackedWeights) -> Any:
        report = load(weights)
        held = {sent_name(n): each for n, each in engine._model.named_parameters() if is_adapter(n)}
        for name, tensor in fault.of({name: each.data.clone() for name, each in held.items()}).items():
            held[name].data = tensor
        return report

    monkeypatch.setattr(engine, "load_weights", spoiled)


Place = Callable[[pytest.MonkeyPatch, Fault, Any], None]
PLACES: dict[str, Place] = {"sender": in_the_sender, "way": on_the_way, "engine": in_the_engine}


# Digests find any fault that the engine receives. What the engine samples with is found by its log-probs.
@pytest.mark.parametrize(("place", "draw"), [("sender", 0), ("way", 0), *(("engine", draw) for draw in range(5))])
@pytest.mark.parametrize("kind", FAULTS)
def test_no_run_starts_with_a_faulty_adapter(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, kind: str, draw: int
) -> None:
    config = make_run(model_path)
    with rank_and_engine(config, model_path, tmp_path) as (policy, engines):
        PLACES[place](monkeypatch, Fault(kind, draw), engines)
        with pytest.raises(ProbeError if place == "engine" else WeightSyncError) as stopped:
            start_run(config, policy, engines)
        assert "lora_" in str(stopped.value) or "adapter" in str(stopped.value)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize(
    ("dtype", "quantization"), [(DType.bfloat16, Quantization.none), (DType.bfloat16, Quantization.int8)]
)
def test_coarse_engines_that_use_another_adapter_are_found(
    model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    dtype: DType,
    quantization: Quantization,
) -> None:
    config = make_run(model_path, dtype=dtype, quantization=quantization)
    with rank_and_engine(config, model_path, tmp_path) as (policy, engines):
        in_the_engine(monkeypatch, Fault(kind, 0), engines)
        with pytest.raises(ProbeError, match="does not sample with the adapter"):
            start_run(config, policy, engines)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("targets", ["all", "attention", ".*layers.1.mlp.down_proj"])
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(DType.float32, Quantization.none), (DType.bfloat16, Quantization.none), (DType.bfloat16, Quantization.int8)],
)
def test_a_run_with_the_right_adapter_starts(
    model_path: Path, tmp_path: Path, dtype: DType, quantization: Quantization, targets: str, seed: int
) -> None:
    config = make_run(model_path, dtype=dtype, quantization=quantization, targets=targets, seed=seed)
    with rank_and_engine(config, model_path, tmp_path) as (policy, engines):
        before = {name: each.detach().to_local().clone() for name, each in parameters(policy).items()}
        assert "adapter proven in use" in start_run(config, policy, engines)
        after = parameters(policy)
        assert all(torch.equal(each, after[name].detach().to_local()) for name, each in before.items())


def parameters(policy: Any) -> dict[str, Any]:
    """The rank's parameters, which the probe must leave as they were."""
    policy.worker._policy.model.reshard()
    return dict(policy.worker._policy.model.named_parameters())
