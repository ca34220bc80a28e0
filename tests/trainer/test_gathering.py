"""Weights that several ranks gather in the engines' type are, bit by bit, those of one process that holds them all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gathering_ranks import published_by_ranks
from policy_cases import make_config
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollout.config import DType, EngineConfig, Quantization
from rollout.sglang.config import SGLangConfig
from rollout.torch.config import TorchEngineConfig
from rollout.types import PackedWeights
from rollout.weights.packed_weights import TensorShape
from rollout.weights.quantization import weight_publisher
from rollout.weights.shared_weights import copy_of
from trainer.policy.model import load_causal_lm

ENGINES: dict[str, EngineConfig] = {
    "float32": TorchEngineConfig(dtype=DType.float32),
    "bfloat16": TorchEngineConfig(dtype=DType.bfloat16),
    "float16": TorchEngineConfig(dtype=DType.float16),
    "int4 in float16": TorchEngineConfig(dtype=DType.float16, quantization=Quantization.int4),
    "int8, as stored": SGLangConfig(quantization=Quantization.int8, gpus_per_engine=1),
    "fp8, as stored": SGLangConfig(quantization=Quantization.fp8, gpus_per_engine=1),
}


def save_odd(path: Path, *, tied: bool) -> Path:
    """A Qwen2 whose dimensions two or three ranks cannot share evenly."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=67,
        hidden_size=28,
        intermediate_size=45,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def published_by_one(path: Path, engine: EngineConfig) -> PackedWeights:
    """The same from whole float32 tensors, without ranks."""
    named = [(name, parameter.detach()) for name, parameter in load_causal_lm(path).named_parameters()]
    publisher = weight_publisher([TensorShape(name, t.dtype, tuple(t.shape)) for name, t in named], engine)
    return copy_of(publisher.publish(named, policy_version=1))


@pytest.mark.parametrize(("tied", "num_ranks", "bucket_bytes"), [(True, 2, 10_000), (False, 3, 1 << 20)])
def test_gathered_weights_are_those_of_the_whole_model(
    tmp_path: Path, tied: bool, num_ranks: int, bucket_bytes: int
) -> None:
    path = save_odd(tmp_path, tied=tied)
    config = make_config(path, num_workers=num_ranks)
    found = published_by_ranks(config, path, ENGINES, bucket_bytes=bucket_bytes)
    assert found.keys() == ENGINES.keys()
    for name, engine in ENGINES.items():
        weights, _ = found[name]
        expected = published_by_one(path, engine)
        assert weights.tensors == expected.tensors, name  # places, shapes and digests
        assert weights.data.tobytes() == expected.data.tobytes(), name
    collectives = [len(sent) for _, sent in found.values()]
    assert min(collectives) > 1 if bucket_bytes < 1 << 20 else set(collectives) == {1}
    whole = sum(found["float32"][1])
    # Half of the bytes, but for the boundaries between tensors.
    assert sum(found["bfloat16"][1]) == sum(found["float16"][1]) < 0.55 * whole
    assert sum(found["bfloat16"][1]) < sum(found["int4 in float16"][1]) < whole
