"""Decode throughput of real SGLang servers on a CPU: attention in batches next to SGLang's `torch_native`, in one run.

    python benchmarks/sglang_attention.py [--sequences 64 256] [--tokens 200] [--repeats 3] [--threads 1]
                                          [--dtype bfloat16]

Two servers run side by side on the model of the arithmetic recipes (a Qwen2 of 3 layers, hidden size 64; built and
cached as in a run, here without an end-of-sequence token). They differ in `attention_backend` alone. An idle server
takes no processor time, and rounds alternate between the two, so both see the same machine. The first round of each is
not counted. A round asks for one batch, 8 samples per prompt of 7 to 9 tokens:

even      every response has --tokens tokens: all slots are busy until the end
ragged    lengths from 10 to --tokens, many short and few long: slots empty towards the end

tokens/s         response tokens / seconds from the call to the last response, median of the rounds; prefill included
CPU ms/step      processor time of the server's scheduler process / longest response; on a busy machine this is the
                 number to trust
slots busy, tail of the ideal schedule for these lengths (trainer/limits/floors.py): tokens / (steps x slots), and the
share of
                 its time with under a quarter of the slots busy
of floor         least seconds for prefill and decode (trainer/limits/floors.py) / measured seconds
RSS              resident memory of the scheduler process after the round

Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rollout.config import DType, SGLangConfig
from rollout.sglang.cpu.platform import ATTENTION_BACKEND
from rollout.sglang.engine import SGLangEngine
from rollout.types import GenerateRequest, SamplingParams
from trainer.config.training import ArithmeticModelConfig
from trainer.limits.ceilings import find_ceilings
from trainer.limits.estimate import DTYPE_BYTES
from trainer.limits.floors import Lengths, Rates, prefill_floor, replay_decode
from trainer.limits.model_shape import directory_shape
from trainer.run.base_model import build_base_model

GROUP = 8
BACKENDS = ("torch_native", ATTENTION_BACKEND)


@dataclass
class Measured:
    """Measurements of one backend with one batch, a number per round."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    rss_bytes: int = 0


class Server:
    """One engine, and its scheduler process."""

    def __init__(self, backend: str, model: Path, logs: Path, arguments: argparse.Namespace) -> None:
        config = SGLangConfig(dtype=DType(arguments.dtype), engine_args={"attention_backend": backend})
        self.engine = SGLangEngine(
            config, index=BACKENDS.index(backend), seed=0, device="cpu", log_dir=logs, num_threads=arguments.threads
        )
        info = self.engine.start(model)
        processes = [psutil.Process(pid) for pid in info.pids]
        (self.scheduler,) = (process for process in processes if "scheduler" in process.name())

    def serve(self, requests: list[GenerateRequest], measured: Measured | None) -> None:
        """One round; counted unless `measured` is None."""
        before, begin = self.scheduler.cpu_times(), time.perf_counter()
        generations = self.engine.generate(requests)
        seconds, after = time.perf_counter() - begin, self.scheduler.cpu_times()
        for request, generation in zip(requests, generations, strict=True):
            assert len(generation.token_ids) == request.sampling.max_new_tokens, "every response has its full length"
        if measured is not None:
            measured.seconds.append(seconds)
            measured.cpu_s.append(after.user + after.system - before.user - before.system)
            measured.rss_bytes = self.scheduler.memory_info().rss


def endless_model(directory: Path) -> Path:
    """The recipes' base model, told to stop at nothing."""
    shutil.copytree(build_base_model(ArithmeticModelConfig()), directory)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((directory / name).read_text(encoding="utf-8"))
        settings.pop("eos_token_id", None)
        (directory / name).write_text(json.dumps(settings), encoding="utf-8")
    return directory


def make_requests(lengths: list[int], *, seed: int, vocab_size: int) -> list[GenerateRequest]:
    """One request per length; `seed` makes the prompts new, so that no prefix is cached from an earlier round."""
    requests = []
    for index, length in enumerate(lengths):
        prompt, sample = divmod(index, GROUP)
        draw = random.Random(f"{seed} {prompt}")  # noqa: S311 - made-up prompts
        token_ids = [draw.randrange(2, vocab_size) for _ in range(7 + prompt % 3)]
        sampling = SamplingParams(temperature=1.0, max_new_tokens=length, seed=seed * 1_000_000 + index)
        requests.append(
            GenerateRequest(prompt_id=prompt, sample_index=sample, prompt_token_ids=token_ids, sampling=sampling)
        )
    return requests


def response_lengths(kind: str, count: int, longest: int) -> list[int]:
    """Ragged: the inverse of a distribution that is skewed as responses are; the longest is `longest`."""
    if kind == "even":
        return [longest] * count
    lengths = [round(10 + (longest - 10) * ((index + 1) / count) ** 3) for index in range(count)]
    random.Random(0).shuffle(lengths)  # noqa: S311 - made-up lengths
    return lengths


def table(model: Path, rows: dict[tuple[int, str, str], Measured], arguments: argparse.Namespace) -> list[str]:
    """Lines of Markdown: a row per backend and batch, then the ratios."""
    shape = directory_shape(model)
    ceilings, dtype = find_ceilings("cpu", num_threads=arguments.threads), DType(arguments.dtype)
    rates = Rates(flops=ceilings.flops(dtype), bytes_per_s=ceilings.copy_bytes_per_s)
    lines = [
        f"{arguments.threads} thread(s), {dtype.value}, {arguments.tokens} tokens, {ceilings}",
        "",
        "| sequences | lengths | attention | tokens/s | CPU ms/step | slots busy | tail | of floor | RSS |",
        "|--:|--|--|--:|--:|--:|--:|--:|--:|",
    ]
    ratios = []
    for count in arguments.sequences:
        for kind in ("even", "ragged"):
            lengths = response_lengths(kind, count, arguments.tokens)
            replay = replay_decode(
                shape, [Lengths(8, length) for length in lengths], rates, number_bytes=DTYPE_BYTES[dtype], slots=None
            )
            floor = replay.seconds + prefill_floor(shape, [8] * (count // GROUP), rates)
            for backend in BACKENDS:
                row = rows[count, kind, backend]
                seconds, cpu_s = statistics.median(row.seconds), statistics.median(row.cpu_s)
                lines.append(
                    f"| {count} | {kind} | {backend} | {sum(lengths) / seconds:,.0f} | "
                    f"{1e3 * cpu_s / max(lengths):.2f} | {replay.busy_frac:.0%} | {replay.tail_frac:.0%} | "
                    f"{floor / seconds:.2%} | {row.rss_bytes / 2**20:,.0f} MiB |"
                )
            native, ours = (rows[count, kind, backend] for backend in BACKENDS)
            by_round = [old / new for old, new in zip(native.seconds, ours.seconds, strict=True)]
            by_cpu = [old / new for old, new in zip(native.cpu_s, ours.cpu_s, strict=True)]
            ratios.append(
                f"{count} {kind}: {statistics.median(by_round):.2f} times the tokens/s "
                f"({min(by_round):.2f} to {max(by_round):.2f} by round), "
                f"{statistics.median(by_cpu):.2f} times the tokens per second of processor time"
            )
    return [*lines, "", *(f"- {ratio}" for ratio in ratios)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=[dtype.value for dtype in DType], default=DType.bfloat16.value)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = endless_model(Path(scratch) / "model")
        vocab_size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        servers: dict[str, Server] = {}
        rows: dict[tuple[int, str, str], Measured] = {}
        try:
            for backend in BACKENDS:
                servers[backend] = Server(backend, model, Path(scratch) / "logs", arguments)
            for count in arguments.sequences:
                for kind in ("even", "ragged"):
                    lengths = response_lengths(kind, count, arguments.tokens)
                    for repeat in range(arguments.repeats + 1):
                        for backend, server in servers.items():
                            measured = rows.setdefault((count, kind, backend), Measured())
                            requests = make_requests(lengths, seed=repeat + 1, vocab_size=vocab_size)
                            server.serve(requests, measured if repeat else None)
                        sys.stderr.write(f"{count} {kind} round {repeat}, load {os.getloadavg()[0]:.1f}\n")
        finally:
            for server in servers.values():
                server.engine.stop()
        sys.stdout.write("\n".join(table(model, rows, arguments)) + "\n")


if __name__ == "__main__":
    main()
