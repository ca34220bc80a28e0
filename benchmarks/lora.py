"""LoRA against training all weights, on one rank of SmolLM2-135M-Instruct: seconds, memory, bytes, and its arithmetic.

    python benchmarks/lora.py [--rank 16] [--steps 4] [--dtype bfloat16] [--checkpoint-every 0]

Each variant runs in a process of its own, one rank without Ray: 12 prompts of 55 tokens x 8 responses of 24,
micro-batches of 2,048 tokens, every k-th layer checkpointed. The engine is embedded and starts after the training, so
that it has no part in the memory. Prints Markdown:

step        forward, backward and update, median of the steps after the first
peak        most memory of the process, less what it took before the model was loaded
beyond      the peak without the bytes of the weights that the model has anyway
checkpoint  bytes on the disk
sync        seconds from the gather to the verified engine of the same type, median of the syncs after the first; of an
            adapter alone, and merged, of all weights with the adapter added to them
bytes       what one sync moves
gradient    largest difference from the gradients of peft under plain autograd, float32, over their largest number
merged      largest difference between log-probs of the adapter beside the weights and added to them, float32, nats
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from rollout.config import DType, TorchEngineConfig
from rollout.group.worker import EngineSetup, RolloutWorker
from rollout.types import FinishReason, Prompt, Sample, SampleGroup
from rollout.weights.adapter import B_ENDING, is_adapter
from trainer.batch.packing import pack
from trainer.compose.compose import resolve
from trainer.config.paths import recipe_dir
from trainer.limits.adapter_shape import sent_adapter
from trainer.policy.host_copy import local_part
from trainer.policy.model import full_tensors, load_causal_lm
from trainer.policy.worker import PolicySetup, PolicyWorker
from trainer.run.task import resolve_model

PROMPTS, GROUP, PROMPT_TOKENS, RESPONSE_TOKENS = 12, 8, 55, 24
SYNCS = 6
SCORED = 4
"""Samples whose gradients and log-probs are compared with peft's."""


def make_groups(count: int, group: int) -> list[SampleGroup]:
    """Random tokens in groups that share a prompt; every second sample is rewarded."""
    generator = np.random.default_rng(0)
    found: list[SampleGroup] = []
    for prompt in range(count):
        shared = generator.integers(100, 40_000, PROMPT_TOKENS)
        found.append(SampleGroup(prompt=Prompt(prompt_id=prompt, token_ids=[], text="", answer="")))
        for index in range(group):
            tokens = np.concatenate([shared, generator.integers(100, 40_000, RESPONSE_TOKENS)])
            found[-1].samples.append(
                Sample(
                    prompt_id=prompt,
                    sample_index=index,
                    token_ids=tokens,
                    response_mask=np.arange(len(tokens)) >= PROMPT_TOKENS,
                    rollout_logprobs=np.full(len(tokens), -10.0),
                    token_versions=np.zeros(len(tokens), dtype=np.int64),
                    finish_reason=FinishReason.length,
                    reward=float(index % 2),
                )
            )
    return found


def peak_bytes() -> int:
    """Most memory that this process has had."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def start_worker(rank: int, dtype: str, directory: Path, *words: str) -> PolicyWorker:
    """One rank of the recipe's model; the adapter has numbers in B, so that everything has a gradient."""
    words = ("policy.num_workers=1", f"policy.lora.rank={rank}", f"policy.dtype={dtype}", "optim.lr=1e-6", *words)
    [run] = resolve(recipe_dir() / "smollm2_grpo.yaml", words, own_dir=None, multirun=False).runs
    assert run.config is not None, run.problems
    config, model_path = run.config, resolve_model(run.config, progress=lambda done, total, detail: None)
    config.rollout = TorchEngineConfig(dtype=DType[dtype])
    worker = PolicyWorker(
        PolicySetup(
            config=config,
            model_path=model_path,
            rank=0,
            init_method=f"file://{directory / 'meeting'}",
            device="cpu",
            num_threads=torch.get_num_threads(),
            log_dir=directory,
        )
    )
    worker.setup()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in worker._policy.model.causal_lm.named_parameters():
        if name.endswith(B_ENDING):
            local_part(parameter.data).normal_(std=0.02, generator=generator)
    return worker


def sync_into_engine(worker: PolicyWorker, directory: Path) -> tuple[float, float]:
    """(median seconds of a sync after the first, bytes that it moves) into an embedded engine."""
    config, model_path = worker._config, worker._setup.model_path
    engine = RolloutWorker(
        EngineSetup(
            config=config.rollout,
            index=0,
            seed=0,
            device="cpu",
            num_threads=torch.get_num_threads(),
            log_dir=directory,
            model_path=model_path,
            adapter=sent_adapter(config, model_path),
        )
    )
    engine.start()
    seconds, moved = [], 0
    for number in range(SYNCS):
        began = time.perf_counter()
        shared = worker.publish_weights(number, with_base=number == 0)
        assert shared is not None
        moved = engine.load_weights(shared).num_bytes
        seconds.append(time.perf_counter() - began)
    engine.stop()
    return statistics.median(seconds[1:]), float(moved)


def measure(rank: int, dtype: str, steps: int, directory: Path, *words: str) -> dict[str, float]:
    """One variant; rank 0 trains all weights."""
    before = peak_bytes()
    worker = start_worker(rank, dtype, directory, *words)
    batch = pack([make_groups(PROMPTS, GROUP)], num_ranks=1, max_tokens=2048, policy_version=0)
    seconds = []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        worker.train(batch.ranks[0], batch.samples, step)
        seconds.append(time.perf_counter() - began)
    peak = peak_bytes() - before
    parameters = dict(worker._policy.model.named_parameters())
    weights = sum(each.numel() * each.element_size() for name, each in parameters.items() if not is_adapter(name))
    (directory / "saved").mkdir()
    worker.save_checkpoint(directory / "saved", False)
    written = sum(path.stat().st_size for path in (directory / "saved").iterdir())
    sync_s, moved = sync_into_engine(worker, directory)
    dist.destroy_process_group()
    return {
        "trained": float(sum(each.numel() for each in parameters.values() if each.requires_grad)),
        "step_s": statistics.median(seconds[1:]),
        "peak": float(peak),
        "beyond": float(peak - weights),
        "checkpoint": float(written),
        "sync_s": sync_s,
        "moved": moved,
    }


def compare(rank: int, directory: Path) -> dict[str, float]:
    """The same adapter in peft, with plain autograd, and added to the weights; all in float32."""
    import peft

    worker = start_worker(rank, "float32", directory)
    model, groups = worker._policy.model, make_groups(SCORED, 1)
    few = [sample for group in groups for sample in group.samples]
    batch = pack([groups], num_ranks=1, max_tokens=10_000, policy_version=0)
    [micro] = batch.ranks[0][0].micro_batches
    scores = model(micro, temperature=1.0)
    worker._policy.zero_grad()
    worker._policy.backward(scores.logprobs[micro.response_index].mean())
    model.reshard()  # type: ignore[operator]  # a rank alone has whole matrices
    trained = {name: each for name, each in model.causal_lm.named_parameters() if is_adapter(name)}
    found = {name: local_part(each.grad) for name, each in trained.items() if each.grad is not None}
    own = {name: local_part(each.data) for name, each in trained.items()}
    merged = dict(full_tensors(model))
    dist.destroy_process_group()
    base = load_causal_lm(worker._setup.model_path)
    base.set_attn_implementation("sdpa")
    lora = worker._config.policy.lora
    described = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    plain = peft.get_peft_model(base, described)
    parameters = {name.removeprefix("base_model.model."): each for name, each in plain.named_parameters()}
    for name, tensor in own.items():
        parameters[name].data.copy_(tensor)

    def logprobs(scorer: torch.nn.Module) -> torch.Tensor:
        rows = torch.tensor(np.stack([sample.token_ids for sample in few]))
        every = torch.log_softmax(scorer(input_ids=rows).logits[:, :-1].float(), -1)
        return every.gather(-1, rows[:, 1:, None])[:, PROMPT_TOKENS - 1 :, 0].flatten()

    expected = logprobs(plain)
    expected.mean().backward()
    theirs = {name: each.grad for name, each in parameters.items() if each.grad is not None}
    largest = max(float(each.abs().max()) for each in theirs.values())
    gradient = max(float((each - found[name]).abs().max()) for name, each in theirs.items()) / largest
    whole = load_causal_lm(worker._setup.model_path)
    whole.set_attn_implementation("sdpa")
    whole.load_state_dict(merged, strict=False)
    with torch.no_grad():
        difference = float((logprobs(whole) - expected).abs().max())
    return {"gradient": gradient, "merged": difference}


def child(arguments: list[str]) -> dict[str, float]:
    """The numbers of this script in another process, whose memory is its own."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--part", choices=["full", "lora", "merged", "peft"], help="for the script's own processes")
    args = parser.parse_args()
    shared = ["--rank", str(args.rank), "--steps", str(args.steps), "--dtype", args.dtype]
    shared += ["--checkpoint-every", str(args.checkpoint_every)]
    if args.part is not None:
        with tempfile.TemporaryDirectory() as made:
            if args.part == "peft":
                numbers = compare(args.rank, Path(made))
            else:
                words = [f"policy.activation_checkpoint_every={args.checkpoint_every}"]
                words += ["policy.lora.merge=true"] * (args.part == "merged")
                rank = 0 if args.part == "full" else args.rank
                numbers = measure(rank, args.dtype, args.steps, Path(made), *words)
        sys.stdout.write(json.dumps(numbers) + "\n")
        return
    full, lora, merged, peft = (child([*shared, "--part", part]) for part in ("full", "lora", "merged", "peft"))
    lines = [f"| {args.dtype} | all weights | rank {args.rank} | ratio | merged | ratio |", "|---|--:|--:|--:|--:|--:|"]
    for key, name, unit, form in (
        ("trained", "trained parameters", 1.0, ",.0f"),
        ("step_s", "step, s", 1.0, ".2f"),
        ("peak", "peak, GiB", 2.0**30, ".2f"),
        ("beyond", "beyond the weights, GiB", 2.0**30, ".2f"),
        ("checkpoint", "checkpoint, MB", 1e6, ",.1f"),
        ("sync_s", "sync, s", 1.0, ".3f"),
        ("moved", "bytes of a sync, MB", 1e6, ",.1f"),
    ):
        cells = [format(full[key] / unit, form)]
        for numbers in (lora, merged):
            cells += [format(numbers[key] / unit, form), f"{numbers[key] / full[key]:.2g}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"Gradients against peft: {peft['gradient']:.1e}. Merged against beside: {peft['merged']:.1e} nats."]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
