"""Peak memory and processor time of one forward and backward: activation checkpointing and offload, each against none.

    python benchmarks/activation_memory.py [--hidden 256] [--layers 12] [--tokens 2048]

The dry run that every training starts with (`trainer/policy/dry_run.py`), on one rank, in a fresh process per variant;
the peak is that of the first run (later ones reuse what the allocator kept), the time that of the second.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollout.config import SamplingConfig, TorchEngineConfig
from rollout.task_config import ArithmeticDataConfig
from trainer.config.train import TrainConfig
from trainer.config.training import (
    BatchConfig,
    HFModelConfig,
    Offload,
    PolicyConfig,
)
from trainer.limits.estimate import largest_micro_batch, model_shape, rank_memory
from trainer.policy.worker import PolicySetup, PolicyWorker

VARIANTS = {
    "none": PolicyConfig(num_workers=1),
    "every second layer": PolicyConfig(num_workers=1, activation_checkpoint_every=2),
    "every layer": PolicyConfig(num_workers=1, activation_checkpoint_every=1),
    "offload=parameters": PolicyConfig(num_workers=1, offload=Offload.parameters),
}
SEQUENCE_TOKENS = 512


def save_model(path: Path, *, hidden: int, layers: int) -> None:
    """Write a random model."""
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)


def config_of(path: Path, policy: PolicyConfig, *, tokens: int) -> TrainConfig:
    """A run whose largest micro-batch has `tokens` tokens."""
    return TrainConfig(
        model=HFModelConfig(path=str(path)),
        data=ArithmeticDataConfig(),
        rollout=TorchEngineConfig(),
        sampling=SamplingConfig(max_new_tokens=SEQUENCE_TOKENS - 6),
        batch=BatchConfig(prompts_per_step=4, group_size=8, max_tokens_per_microbatch=tokens),
        policy=policy,
    )


def measure(_: int, path: Path, variant: str, tokens: int, result: Path) -> None:
    """Run one variant and write down peak MiB, planned MiB and seconds of processor time."""
    config = config_of(path, VARIANTS[variant], tokens=tokens)
    setup = PolicySetup(
        config=config,
        model_path=path,
        log_dir=path,
        rank=0,
        init_method=f"file://{result}.meet",
        device="cpu",
        num_threads=1,
    )
    worker = PolicyWorker(setup)
    worker.setup()
    groups = largest_micro_batch(config)
    report = worker.dry_run(groups)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    worker.dry_run(groups)
    seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    memory = rank_memory(config, model_shape(config))
    planned = memory.working + memory.gradients
    result.write_text(f"{report.peak_bytes / 2**20:.0f} {planned / 2**20:.0f} {seconds:.1f}", encoding="ascii")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        save_model(path, hidden=args.hidden, layers=args.layers)
        sys.stdout.write("| variant | peak, MiB | planned, MiB | time, s | times none | by FLOPs |\n")
        base = 0.0
        for variant, policy in VARIANTS.items():
            result = Path(directory) / variant
            mp.spawn(measure, args=(path, variant, args.tokens, result), nprocs=1)
            peak, planned, seconds = map(float, result.read_text(encoding="ascii").split())
            base = base or seconds
            every = policy.activation_checkpoint_every
            # A backward costs two forwards, and a layer that is computed again costs one more.
            factor = 1 + (1 / every if every else 0) / 3
            sys.stdout.write(
                f"| {variant} | {peak:.0f} | {planned:.0f} | {seconds:.1f} | {seconds / base:.2f} | {factor:.2f} |\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
