"""A tiny random policy, its samples, and one FSDP2 rank without an actor around it: shared by tests of the trainer."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
import torch
import torch.distributed as dist
from test_packing import make_sample
from tokenizers import Tokenizer, models
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from algorithms.config import (
    AdvantageConfig,
    Aggregation,
    BypassConfig,
    CorrectionConfig,
    Estimator,
    LossConfig,
    MISConfig,
    PPOClipConfig,
    PPOISConfig,
    RecomputeConfig,
    TISConfig,
    VanillaISConfig,
)
from rollout.config import DType
from rollout.group.engine_group import EngineGroup
from rollout.group.group_member import Published
from rollout.task_config import ArithmeticDataConfig
from rollout.torch.config import TorchEngineConfig
from rollout.types import GenerateRequest, Generation, Sample, SamplingParams, SharedWeights, TensorSpec
from rollout.weights.adapter import B_ENDING
from rollout.weights.shared_weights import DATA_START
from trainer.config.train import TrainConfig
from trainer.config.training import (
    BatchConfig,
    HFModelConfig,
    OptimConfig,
    PolicyConfig,
)
from trainer.policy.host_copy import local_part, own_rows
from trainer.policy.worker import PolicySetup, PolicyWorker

MODES: dict[str, CorrectionConfig] = {
    "recompute": RecomputeConfig(),
    "ppo_is": PPOISConfig(),
    "vanilla_is": VanillaISConfig(),
    "tis": TISConfig(),
    "mis": MISConfig(),
    "bypass": BypassConfig(),
}
"""The six modes, with their default bounds."""


def save_policy(path: Path, *, vocab_size: int = 64) -> Path:
    """Write the weights of a two-layer Qwen2 with 64 tokens of vocabulary, or `vocab_size`, to `path`."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def save_words(path: Path, *, end: int = 1) -> Path:
    """Write a tokenizer of two words, of which token `end` ends a response, to `path`."""
    words = Tokenizer(models.WordLevel({"a": 0, "<eos>": end}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(path)
    return path


def save_untied(path: Path) -> Path:
    """Three Qwen3 layers in bfloat16, in several files; 50 rows of vocabulary."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path, max_shard_size="20KB")
    assert (path / "model.safetensors.index.json").is_file()
    return path


def make_config(
    model_path: Path,
    *,
    num_workers: int = 2,
    num_engines: int = 1,
    correction: CorrectionConfig | None = None,
    mini_batch_prompts: int | None = None,
    loss: LossConfig | None = None,
    advantage: AdvantageConfig | None = None,
) -> TrainConfig:
    """A run of the tiny policy: 4 prompts x 4 samples."""
    return TrainConfig(
        model=HFModelConfig(path=str(model_path)),
        data=ArithmeticDataConfig(),
        rollout=TorchEngineConfig(dtype=DType.float32, num_engines=num_engines),
        batch=BatchConfig(prompts_per_step=4, group_size=4, mini_batch_prompts=mini_batch_prompts),
        # The reward of a sample is its advantage.
        advantage=advantage or AdvantageConfig(estimator=Estimator.reinforce),
        correction=correction or TISConfig(),
        loss=loss or PPOClipConfig(),
        optim=OptimConfig(lr=1e-2),
        policy=PolicyConfig(num_workers=num_workers, dtype=DType.float32),
    )


def make_samples() -> list[Sample]:
    """Four groups of four responses of 2 to 6 tokens, log-probs far from the policy's."""
    return [make_sample(prompt_id=p, index=i, response=2 + (3 * p + i) % 5) for p in range(4) for i in range(4)]


def by_aggregation(aggregation: Aggregation) -> LossConfig:
    """PPO-clip with this aggregation."""
    fixed = 1024 if aggregation is Aggregation.fixed_length else None
    return PPOClipConfig(aggregation=aggregation, fixed_length_tokens=fixed)


@contextmanager
def lone_worker(config: TrainConfig, model_path: Path, *, critic_path: Path | None = None) -> Iterator[PolicyWorker]:
    """One FSDP2 rank in this process: the same worker without an actor around it."""
    worker = PolicyWorker(
        PolicySetup(
            config=config,
            model_path=model_path,
            critic_path=critic_path,
            rank=0,
            init_method=f"file://{model_path / secrets.token_hex(8)}",
            device="cpu",
            num_threads=1,
            log_dir=model_path,
        )
    )
    try:
        worker.setup()
        yield worker
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def count_forwards(worker: PolicyWorker) -> list[int]:
    """Tokens of every forward of the policy from now on, as a list that grows."""
    tokens: list[int] = []
    worker._policy.model.register_forward_pre_hook(lambda module, args: tokens.append(args[0].num_tokens))
    return tokens


def move_adapter(worker: PolicyWorker) -> None:
    """Give the matrices B of an adapter numbers, the same with any number of ranks; a new one is zero."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in worker._policy.model.causal_lm.named_parameters():
        if name.endswith(B_ENDING):
            whole = torch.randn(parameter.shape, generator=generator) * 0.1
            start, stop = own_rows(parameter.data)
            local_part(parameter.data).copy_(whole[start:stop])


def full_gradient(model: nn.Module) -> torch.Tensor:
    """The whole gradient [P] of a sharded model; a collective."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in grads])


def published(shared: SharedWeights, node: str) -> Published:
    """Weights for engines that are all on `node`."""
    return Published(shared=shared, node=node)


def held_versions(engines: EngineGroup) -> list[int]:
    """Version under which each serving engine samples a token."""
    params = SamplingParams(temperature=1.0, max_new_tokens=1, seed=0)
    request = GenerateRequest(prompt_id=0, sample_index=0, prompt_token_ids=[3, 5], sampling=params)
    found = []
    for member in engines._serving():
        ray.get(member.worker.submit.remote([-1], [request]), timeout=60)
        ended: dict[int, Generation] = {}  # also of what was aborted and nobody polled
        while -1 not in ended:
            ended |= dict(ray.get(member.worker.poll.remote(60.0), timeout=60))
        found.append(ended[-1].policy_version)
    return found


def flip_byte(shared: SharedWeights, spec: TensorSpec) -> None:
    """Change one bit of a tensor where it lies."""
    with open(shared.address.path, "r+b") as region:
        region.seek(DATA_START + spec.offset + 1)
        byte = region.read(1)[0]
        region.seek(-1, os.SEEK_CUR)
        region.write(bytes([byte ^ 4]))
