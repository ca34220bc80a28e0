"""Seconds that a checkpoint takes from training: the step waits for the disk, or it is written in the background.

    python benchmarks/save_time.py [--width 768] [--layers 12] [--repeats 3] [--work-s 2] [--dir DIR]

One rank on a CPU with the real writer (`trainer/policy/shards.py`): weights and both moments of AdamW of a random Qwen2
in float32. After each save a fixed number of matrix products takes the place of training. The two ways alternate.

exposed   seconds until `save` returns, when training may go on
written   seconds until the files are on the disk and hashed
total     seconds of the save and the work after it, and of waiting for what is then still being written
alone     seconds of the work without a save

Prints Markdown.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollout.config import DType
from trainer.config.training import OptimConfig
from trainer.policy.model import shard
from trainer.policy.shards import ShardWriter
from trainer.policy.trainable import Trainable
from trainer.scoring.forward import ScoringModel

SIZE = 512
VOCABULARY = 32_000


@dataclass(frozen=True)
class Timing:
    """One save."""

    exposed_s: float
    written_s: float
    total_s: float


def build(width: int, layers: int) -> Trainable[ScoringModel]:
    """A sharded model whose optimizer has taken a step."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        tie_word_embeddings=True,
    )
    causal_lm = Qwen2ForCausalLM(config)
    torch.nn.Module.to(causal_lm, torch.float32)  # in place
    model = ScoringModel(causal_lm, chunk_tokens=SIZE)
    shard(model, model.causal_lm.get_decoder(), init_device_mesh("cpu", (1,)), DType.float32)
    trainable = Trainable(model, OptimConfig(), name="policy")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainable.update(0.0)
    trainable.zero_grad()
    return trainable


def work(products: int) -> float:
    """Seconds of so many matrix products."""
    started = time.perf_counter()
    matrix = torch.ones(SIZE, SIZE)
    for _ in range(products):
        torch.mm(matrix, matrix)
    return time.perf_counter() - started


def measure(
    trainable: Trainable[ScoringModel], writer: ShardWriter, *, background: bool, products: int, path: Path
) -> Timing:
    """Save once, work, wait."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    started = time.perf_counter()
    writer.save({"policy": trainable.state_dict()}, path, asynchronous=background)
    exposed_s = time.perf_counter() - started
    work(products)
    report = writer.report(wait=True)
    if report is None or report.error is not None:
        raise SystemExit(f"the save failed: {report}")
    return Timing(exposed_s=exposed_s, written_s=report.write_s, total_s=time.perf_counter() - started)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="save time")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work-s", type=float, default=2.0)
    parser.add_argument("--dir", type=Path, default=None)
    arguments = parser.parse_args()
    place = arguments.dir or Path(tempfile.mkdtemp(prefix="parity-save-"))
    place.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{(place / 'meeting').resolve()}", rank=0, world_size=1)
    trainable = build(arguments.width, arguments.layers)
    writer = ShardWriter(rank=0, device=torch.device("cpu"), timeout_s=600.0)
    products = max(1, round(20 * arguments.work_s / work(20)))
    timings: dict[bool, list[Timing]] = {False: [], True: []}
    alone = []
    for _ in range(arguments.repeats):
        for background in (False, True):
            alone.append(work(products))
            path = place / "saved"
            timings[background].append(measure(trainable, writer, background=background, products=products, path=path))
    size = sum(file.stat().st_size for file in (place / "saved").rglob("*"))
    dist.destroy_process_group()
    shutil.rmtree(place)
    count = sum(parameter.numel() for parameter in trainable.model.parameters())
    out = sys.stdout.write
    out(f"{count / 1e6:.0f} M parameters, {size / 2**30:.2f} GiB, {arguments.repeats} saves each, medians; ")
    out(f"work alone {statistics.median(alone):.2f} s\n\n")
    out("| saving | exposed, s | written, s | total with the work, s |\n|---|--:|--:|--:|\n")
    for background, found in timings.items():
        cells = [
            f"{statistics.median(values):.2f}"
            for values in (
                [timing.exposed_s for timing in found],
                [timing.written_s for timing in found],
                [timing.total_s for timing in found],
            )
        ]
        out(f"| {'in the background' if background else 'the step waits'} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
