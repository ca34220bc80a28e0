"""One rank in this process: alone, or as rank 0 of many that do not exist; and the data to train it on.

A fake rank has torch's `fake` process group, which moves nothing. What FSDP gathers and reduces is replaced by copies
of the rank's own part, so that every number is finite: memory and compute time are those of a rank among many,
communication takes no time, and the values mean nothing.
"""

from __future__ import annotations

import gc
import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from algorithms.config import AdvantageConfig, Estimator, PPOClipConfig, TISConfig
from gpu_check.attention_fit import fitting_attention
from gpu_check.host import Host
from gpu_check.models import Size, sparse_model
from rollout.config import DType, SamplingConfig
from rollout.task_config import FileDataConfig
from rollout.torch.config import TorchEngineConfig
from rollout.types import FinishReason, Prompt, Sample, SampleGroup
from trainer.batch.packing import micro_batch, step_samples
from trainer.batch.train_batch import MicroBatch, RankMiniBatch, StepSamples
from trainer.config.train import TrainConfig
from trainer.config.training import BatchConfig, HFModelConfig, Offload, OptimConfig, PolicyConfig
from trainer.limits.floors import GroupLengths
from trainer.policy.host_copy import local_part
from trainer.policy.worker import PolicySetup, PolicyWorker

WEIGHT_STD = 0.02
"""Spread of drawn weights: that with which Qwen2 is initialised."""
NUM_STEPS = 1000
"""Rollout steps of the run that a rank believes in, so that a check can take as many as it likes."""
SOURCE = "word_problems:one_step@train"
"""A source of rows that needs no file; no check reads a row."""
GATHER = ("all_gather_into_tensor", "all_gather_single")
SCATTER = ("reduce_scatter_tensor", "reduce_scatter_single")
"""The collectives that FSDP calls, by their names in torch 2.11 and 2.13."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a check chooses of a run; the names are those of the recipe's keys."""

    size: Size
    prompt_tokens: int
    response_tokens: int
    cap: int
    """batch.max_tokens_per_microbatch."""
    num_workers: int = 1
    prompts_per_step: int = 128
    group_size: int = 8
    mini_batch_prompts: int | None = None
    checkpoint_every: int = 0
    """policy.activation_checkpoint_every."""
    torch_compile: bool = False
    offload: Offload = Offload.none
    dtype: DType = DType.bfloat16


def run_config(setting: Setting, host: Host) -> TrainConfig:
    """The config of a run on this host; the rank's GPU is its own."""
    gpus = host.pick(1.0, 0.0)
    return TrainConfig(
        model=HFModelConfig(path=str(sparse_model(host.scratch, setting.size))),
        data=FileDataConfig(train_path=SOURCE, eval_path=SOURCE, max_prompt_tokens=setting.prompt_tokens),
        rollout=TorchEngineConfig(gpus_per_engine=gpus),
        sampling=SamplingConfig(max_new_tokens=setting.response_tokens),
        batch=BatchConfig(
            prompts_per_step=setting.prompts_per_step,
            group_size=setting.group_size,
            mini_batch_prompts=setting.mini_batch_prompts,
            max_tokens_per_microbatch=setting.cap,
        ),
        # The reward of a sample is its advantage, so that no group has to be whole.
        advantage=AdvantageConfig(estimator=Estimator.reinforce),
        correction=TISConfig(),
        loss=PPOClipConfig(),
        optim=OptimConfig(lr=1e-6),
        policy=PolicyConfig(
            num_workers=setting.num_workers,
            gpus_per_worker=gpus,
            dtype=setting.dtype,
            activation_checkpoint_every=setting.checkpoint_every,
            torch_compile=setting.torch_compile,
            offload=setting.offload,
        ),
    )


@contextmanager
def lone_rank(config: TrainConfig, host: Host) -> Iterator[PolicyWorker]:
    """The only rank of its group, with drawn weights."""
    init = f"file://{host.scratch / secrets.token_hex(8)}"
    with fitting_attention(), _worker(config, host, init) as worker:
        draw_weights(worker, seed=config.run.seed)
        yield worker


@contextmanager
def fake_rank(config: TrainConfig, host: Host) -> Iterator[PolicyWorker]:
    """Rank 0 of `policy.num_workers` ranks, of which the others do not exist; its weights are drawn."""
    ranks = config.policy.num_workers
    real_group = dist.init_process_group

    def join(*args: Any, **kwargs: Any) -> None:
        real_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    def new_group(*args: Any, **kwargs: Any) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    def gather(output: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> None:
        output.view(ranks, -1).copy_(source.view(1, -1).expand(ranks, -1))

    def scatter(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> None:
        output.copy_(input.view(ranks, -1)[0])

    replaced = {"init_process_group": join, "new_group": new_group}
    replaced |= {name: gather for name in GATHER if hasattr(dist, name)}
    replaced |= {name: scatter for name in SCATTER if hasattr(dist, name)}
    with ExitStack() as stack:
        stack.enter_context(fitting_attention())
        for name, function in replaced.items():
            stack.enter_context(patch.object(dist, name, function))
        worker = stack.enter_context(_worker(config, host, None))
        draw_weights(worker, seed=config.run.seed)
        yield worker


@contextmanager
def _worker(config: TrainConfig, host: Host, init_method: str | None) -> Iterator[PolicyWorker]:
    setup = PolicySetup(
        config=config,
        model_path=Path(config.model.path) if isinstance(config.model, HFModelConfig) else host.scratch,
        rank=0,
        init_method=init_method,
        device=host.device.type,
        num_threads=host.threads,
        log_dir=host.scratch,
    )
    worker = PolicyWorker(setup)
    try:
        worker.setup()
        yield worker
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        del worker
        gc.collect()
        if host.is_cuda:
            torch.cuda.empty_cache()


@torch.no_grad()
def draw_weights(worker: PolicyWorker, *, seed: int) -> None:
    """Draw the rank's part of every matrix; norms become 1 and biases 0. Zeros would multiply faster on a GPU."""
    model = worker._policy.model
    # On the device of the rank, wherever the weights lie: with and without offload they are the same numbers.
    generator = torch.Generator(worker._device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        local = local_part(parameter)
        if parameter.ndim >= 2:
            drawn = torch.empty(local.shape, device=worker._device)
            local.copy_(drawn.normal_(0.0, WEIGHT_STD, generator=generator))
        else:
            local.fill_(0.0 if name.endswith("bias") else 1.0)


def training_data(
    config: TrainConfig, groups: Sequence[GroupLengths], *, vocab: int, num_micro_batches: int, seed: int = 0
) -> tuple[RankMiniBatch, StepSamples]:
    """A mini-batch of equal micro-batches, each of the `groups`, and the facts of its samples; tokens are random.

    The log-probs of the engine are those of a uniform distribution, rewards are 1 and -1 in turn.
    """
    generator = np.random.default_rng(seed)
    micros: list[MicroBatch] = []
    made: list[SampleGroup] = []
    num_samples = num_tokens = 0
    for _ in range(num_micro_batches):
        part: list[Sample] = []
        for group in groups:
            prompt = Prompt(prompt_id=len(made), token_ids=[], text="", answer="")
            samples = group_samples(group, prompt_id=prompt.prompt_id, vocab=vocab, generator=generator)
            made.append(SampleGroup(prompt=prompt, samples=samples))
            part += samples
        micros.append(micro_batch(part, range(num_samples, num_samples + len(part)), policy_version=0))
        num_samples += len(part)
        num_tokens += sum(sample.num_response_tokens for sample in part)
    ranks = config.policy.num_workers
    mini = RankMiniBatch(
        micro_batches=micros, num_response_tokens=num_tokens * ranks, num_sequences=num_samples * ranks
    )
    return mini, step_samples(made, policy_version=0)


def group_samples(group: GroupLengths, *, prompt_id: int, vocab: int, generator: np.random.Generator) -> list[Sample]:
    """Samples of one prompt with random tokens."""
    prompt = generator.integers(2, vocab, group.prompt)
    samples = []
    for index, rest in enumerate(group.rests):
        tokens = np.concatenate([prompt, generator.integers(2, vocab, rest)])
        mask = np.arange(len(tokens)) >= group.prompt
        samples.append(
            Sample(
                prompt_id=prompt_id,
                sample_index=index,
                token_ids=tokens,
                response_mask=mask,
                rollout_logprobs=np.where(mask, -math.log(vocab), 0.0),
                token_versions=np.zeros(len(tokens), dtype=np.int64),
                finish_reason=FinishReason.length,
                reward=1.0 if index % 2 == 0 else -1.0,
            )
        )
    return samples


def unsharded_gradient_bytes(worker: PolicyWorker) -> int:
    """Bytes of whole gradients that FSDP keeps on this rank between two micro-batches."""
    total = 0
    for module in worker._policy.model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for parameter in (p for group in groups if group is not None for p in group.fsdp_params):
            kept = parameter.unsharded_accumulated_grad
            total += 0 if kept is None else kept.untyped_storage().nbytes()
    return total


def bits(worker: PolicyWorker, *, gradients: bool = False) -> Tensor:
    """The rank's weights, or its gradients, as one tensor [bytes] uint8 on the host."""
    tensors = [p.grad if gradients else p.detach() for p in worker._policy.model.parameters()]
    parts = [local_part(t).detach().cpu().contiguous().view(-1).view(torch.uint8) for t in tensors if t is not None]
    return torch.cat(parts)
