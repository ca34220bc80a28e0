"""What every mode costs: seconds of a training call, in turn, for 1, 2 and 4 optimizer steps per rollout.

    python benchmarks/mode_cost.py [--hidden 256] [--layers 4] [--prompts 16] [--group 8] [--response 96] [--repeats 5]

One FSDP2 rank in this process with one thread, a random Qwen2 in float32, random prompts and responses of one to
`--response` tokens whose log-probs are the policy's own plus noise; the same samples in every mode. Forwards are those
of `forwards_per_token`. Seconds: processor time of the thread, so that other programs count little; the median over
repeats that go round the modes. Prints Markdown.
"""

from __future__ import annotations

import argparse
import random
import secrets
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from algorithms.config import (
    BypassConfig,
    CorrectionConfig,
    MISConfig,
    PPOISConfig,
    RecomputeConfig,
    RejectedDenominator,
    SelfNormalize,
    TISConfig,
    VanillaISConfig,
)
from rollout.config import DType, SamplingConfig
from rollout.task_config import ArithmeticDataConfig
from rollout.torch.config import TorchEngineConfig
from rollout.types import FinishReason, Prompt, Sample, SampleGroup
from trainer.batch.packing import micro_batch, pack, split_mini_batches
from trainer.batch.train_batch import TrainBatch
from trainer.config.train import TrainConfig
from trainer.config.training import (
    BatchConfig,
    HFModelConfig,
    OptimConfig,
    PolicyConfig,
)
from trainer.policy.step import TrainingStep
from trainer.policy.worker import PolicySetup, PolicyWorker

MODES: dict[str, CorrectionConfig] = {
    "recompute": RecomputeConfig(),
    "ppo_is": PPOISConfig(),
    "vanilla_is": VanillaISConfig(),
    "tis": TISConfig(),
    "mis": MISConfig(),
    "bypass": BypassConfig(),
    "tis, weights divided by their mean": TISConfig(self_normalize=SelfNormalize.mean_one),
    "mis, denominator of what is kept": MISConfig(rejected_denominator=RejectedDenominator.drop),
}
OPTIMIZER_STEPS = (1, 2, 4)
VOCABULARY = 4096
PROMPT_TOKENS = 16
MAX_TOKENS = 2048
"""Cap of a micro-batch."""


def save_model(path: Path, arguments: argparse.Namespace) -> None:
    """A random Qwen2."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 32,
        num_key_value_heads=arguments.hidden // 32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)


def make_groups(arguments: argparse.Namespace) -> list[SampleGroup]:
    """Groups with rewards and advantages; log-probs are filled in by `score`."""
    draw = random.Random(0)  # noqa: S311 - made-up lengths
    groups: list[SampleGroup] = []
    for prompt_id in range(arguments.prompts):
        groups.append(SampleGroup(prompt=Prompt(prompt_id=prompt_id, token_ids=[], text="", answer="")))
        for index in range(arguments.group):
            count = draw.randint(1, arguments.response)
            groups[-1].samples.append(
                Sample(
                    prompt_id=prompt_id,
                    sample_index=index,
                    token_ids=np.array([draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS + count)]),
                    response_mask=np.arange(PROMPT_TOKENS + count) >= PROMPT_TOKENS,
                    rollout_logprobs=np.zeros(PROMPT_TOKENS + count),
                    token_versions=np.zeros(PROMPT_TOKENS + count, dtype=np.int64),
                    finish_reason=FinishReason.stop,
                    reward=draw.random(),
                )
            )
    return groups


def score(worker: PolicyWorker, groups: list[SampleGroup]) -> None:
    """Give every sample the policy's own log-probs plus noise of 0.05 nats."""
    noise = np.random.default_rng(1)
    for sample in (sample for group in groups for sample in group.samples):
        own = worker.logprobs([micro_batch([sample])])[0].numpy()
        shifted = np.minimum(own + noise.normal(0, 0.05, own.shape), 0.0)
        sample.rollout_logprobs = np.where(sample.response_mask, shifted, 0.0)


def measure(
    worker: PolicyWorker, base: TrainConfig, batches: dict[int, TrainBatch], repeats: int
) -> dict[tuple[str, int], list[float]]:
    """Seconds of every training call by (mode, optimizer steps); the first round warms up and is not counted."""
    found: dict[tuple[str, int], list[float]] = {(mode, steps): [] for steps in OPTIMIZER_STEPS for mode in MODES}
    for repeat in range(repeats + 1):
        for mode, steps in found:
            config = with_mode(base, mode, steps)
            worker._training = TrainingStep(config, worker._policy, reference=None, critic=None, device=worker._device)
            started = time.process_time()
            report = worker.train(batches[steps].ranks[0], batches[steps].samples, 1)
            seconds = time.process_time() - started
            if report.num_optimizer_steps != steps:
                raise RuntimeError(f"{mode}: {report.num_optimizer_steps} of {steps} optimizer steps were taken")
            if repeat:
                found[mode, steps].append(seconds)
    return found


def with_mode(base: TrainConfig, mode: str, steps: int) -> TrainConfig:
    batch = replace(base.batch, mini_batch_prompts=base.batch.prompts_per_step // steps)
    return replace(base, correction=MODES[mode], batch=batch)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("layers", 4), ("prompts", 16), ("group", 8), ("response", 96)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch)
        save_model(path, arguments)
        config = TrainConfig(
            model=HFModelConfig(path=scratch),
            data=ArithmeticDataConfig(),
            rollout=TorchEngineConfig(dtype=DType.float32),
            sampling=SamplingConfig(max_new_tokens=arguments.response),
            batch=BatchConfig(
                prompts_per_step=arguments.prompts, group_size=arguments.group, max_tokens_per_microbatch=MAX_TOKENS
            ),
            correction=TISConfig(),
            optim=OptimConfig(lr=1e-12),  # the policy stays what the samples were scored with
            policy=PolicyConfig(num_workers=1),
        )
        setup = PolicySetup(
            config=config,
            model_path=path,
            log_dir=path,
            rank=0,
            init_method=f"file://{path / secrets.token_hex(8)}",
            device="cpu",
            num_threads=1,
        )
        worker = PolicyWorker(setup)
        worker.setup()
        groups = make_groups(arguments)
        score(worker, groups)
        batches = {
            steps: pack(
                split_mini_batches(groups, steps),
                num_ranks=1,
                max_tokens=MAX_TOKENS,
                policy_version=0,
            )
            for steps in OPTIMIZER_STEPS
        }
        found = measure(worker, config, batches, arguments.repeats)
        dist.destroy_process_group()
    lines = [
        f"{sum(len(sample.token_ids) for group in groups for sample in group.samples):,} tokens per rollout step",
        "",
        "| `correction=` | " + " | ".join(f"{steps}: forwards | s | times tis" for steps in OPTIMIZER_STEPS) + " |",
        "|---|" + "--:|" * (3 * len(OPTIMIZER_STEPS)),
    ]
    for mode in MODES:
        cells = []
        for steps in OPTIMIZER_STEPS:
            seconds = statistics.median(found[mode, steps])
            forwards = with_mode(config, mode, steps).forwards_per_token
            cells += [str(forwards), f"{seconds:.2f}", f"{seconds / statistics.median(found['tis', steps]):.2f}"]
        lines.append(f"| {mode} | {' | '.join(cells)} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
