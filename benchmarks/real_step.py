"""GRPO steps of a real model, SmolLM2-135M-Instruct: seconds by phase, tokens per second, MFU, K3 and peak memory.

    python benchmarks/real_step.py [--steps 3] [--variants sglang-float32 torch-bfloat16 ...] [--out FILE]

Each variant is a `parity train gsm8k_grpo_smollm2` of its own, one after the other: 8 prompts x 8 samples, responses of
at most 48 tokens, one rank, one engine, one optimizer step per rollout, and engine and trainer in the same type. The
prompts are the questions of GSM8K below $PARITY_TEST_DATA, or made ones of that length without it: about 100 tokens
with the chat template and the instruction of the recipe. An even sum of code points is rewarded, so that groups
disagree whatever the model says.

Everything but memory is what the run logs; the table has the medians of --steps steps after a first one that is not
counted. A step is taken without its evaluation. Memory is the highest resident memory of each process, shared pages
included, as the kernel counts it.

The first run fetches the model, 93 MB (trainer/models/smollm2.py). Measure on a machine that nobody else uses. Markdown
goes to standard output, and with --out also to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trainer.rundir.provenance import environment_record
from trainer.rundir.rows import read_rows

ROOT = Path(__file__).resolve().parents[1]
REWARD_FILE = Path(__file__).with_name("half_rewarded.py").resolve()
VARIANTS = tuple(f"{engine}-{dtype}" for engine in ("sglang", "torch") for dtype in ("bfloat16", "float32"))
PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS = 8, 8, 48
MADE_ROWS = 200
POLL_S = 2.0
"""Seconds between two looks at the memory; the kernel keeps the peak in between."""
LEFT_OUT = ("time/step_s", "time/eval_s")
ROLES = {"rank": "ray::PolicyWorker", "engine": "ray::RolloutWorker", "server": "sglang::scheduler"}
"""Process of a run -> how its title begins; an SGLang engine has its server beside it."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One variant."""

    rows: list[dict[str, Any]]
    """Rows of metrics.jsonl of the counted steps."""
    peaks: dict[str, int]
    """Peak resident bytes by process: driver, rank, engine and server; of several of a kind the largest."""
    assumptions: list[str]
    """Lines of accounting.json: formula of MFU, measured limits of the machine."""

    def median(self, key: str) -> float | None:
        values = [row[key] for row in self.rows if row.get(key) is not None]
        return statistics.median(values) if values else None

    @property
    def step_s(self) -> float:
        """Seconds of a step without its evaluation."""
        return statistics.median(row["time/step_s"] - (row.get("time/eval_s") or 0.0) for row in self.rows)

    @property
    def tokens_per_s(self) -> float:
        """Response tokens per second of a step."""
        return statistics.median(
            row["rollout/response_tokens"] / (row["time/step_s"] - (row.get("time/eval_s") or 0.0)) for row in self.rows
        )

    @property
    def phases(self) -> list[str]:
        """Keys of the phases, in the order of the row."""
        return [key for key in self.rows[-1] if key.startswith("time/") and key not in LEFT_OUT]


def data_words(scratch: Path) -> Iterator[str]:
    """The prompts: GSM8K where it is at hand, made ones of the same length elsewhere."""
    configured = os.environ.get("PARITY_TEST_DATA")
    if configured:
        directory = Path(configured).absolute() / "gsm8k"
    else:
        directory = scratch
        for name, first in (("train", 0), ("test", MADE_ROWS)):
            rows = (json.dumps(made_row(number)) for number in range(first, first + MADE_ROWS))
            (directory / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    yield f"data.train_path={directory / 'train.jsonl'}"
    yield f"data.eval_path={directory / 'test.jsonl'}"


def made_row(number: int) -> dict[str, str]:
    """A problem in words, as long as those of GSM8K are on average, and its answer."""
    boxes, apples, eaten, price = 3 + number % 17, 5 + number % 23, 2 + number % 7, 2 + number % 5
    return {
        "question": f"Anna has {boxes} boxes with {apples} apples in each of them. On Monday she and her brother eat "
        f"{eaten} of the apples in the morning, and in the afternoon she takes all that are left to the market of the "
        f"village, where she sells every one of them for {price} dollars. How many dollars does Anna earn there?",
        "answer": f"#### {(boxes * apples - eaten) * price}",
    }


def run_words(variant: str, *, steps: int, run_dir: Path) -> Iterator[str]:
    """The command line of a variant after the recipe, but for the data."""
    engine, dtype = variant.split("-")
    yield f"rollout={engine}"
    yield f"rollout.dtype={dtype}"
    yield f"policy.dtype={dtype}"
    yield f"run.num_steps={steps + 1}"
    yield f"run.dir={run_dir}"
    yield f"batch.prompts_per_step={PROMPTS}"
    yield f"batch.group_size={GROUP_SIZE}"
    yield f"sampling.max_new_tokens={MAX_NEW_TOKENS}"
    yield f"reward.function={REWARD_FILE}:rewarded"
    yield "optim.lr=1e-6"
    yield "eval.every=0"
    yield "eval.max_prompts=1"
    yield "checkpoint.every=0"
    yield "tracking.wandb=disabled"


def measure(variant: str, *, steps: int, timeout_s: float) -> Measured:
    """Run one variant in a child process and read what the run wrote."""
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        words = [*run_words(variant, steps=steps, run_dir=run_dir), *data_words(Path(scratch))]
        command = [sys.executable, "-m", "trainer", "train", "gsm8k_grpo_smollm2", *words]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with subprocess.Popen(  # noqa: S603  (our own command)
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr, env=environment
        ) as child:
            try:
                peaks = watch(child, timeout_s=timeout_s)
            except BaseException:
                child.terminate()  # the run ends after its step, and takes its processes with it
                raise
        if child.returncode:
            raise SystemExit(f"{variant}: exit status {child.returncode}; the output of the run is above")
        rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["step"]]
        assumptions = json.loads((run_dir / "accounting.json").read_text(encoding="utf-8"))["assumptions"]
    return Measured(rows=rows[1:], peaks=peaks, assumptions=assumptions)


def watch(child: subprocess.Popen[bytes], *, timeout_s: float) -> dict[str, int]:
    """Wait for the end of a run; returns the peak of resident memory in bytes by name of the process."""
    peaks: dict[str, int] = {}
    deadline = time.monotonic() + timeout_s
    driver = psutil.Process(child.pid)
    while child.poll() is None:
        if time.monotonic() > deadline:
            raise SystemExit(f"no end within {timeout_s:.0f} s")
        try:
            processes = [driver, *driver.children(recursive=True)]
        except psutil.NoSuchProcess:  # the run has just ended
            break
        for process in processes:
            name = "driver" if process.pid == child.pid else role(process)
            if name is not None:
                peaks[name] = max(peaks.get(name, 0), peak_bytes(process.pid))
        time.sleep(POLL_S)
    child.wait()
    return peaks


def role(process: psutil.Process) -> str | None:
    """Name of the process in the table; None for one that is not there, or has just ended."""
    try:
        title = " ".join(process.cmdline())
    except psutil.Error:
        return None
    return next((name for name, beginning in ROLES.items() if title.startswith(beginning)), None)


def peak_bytes(pid: int) -> int:
    """Highest resident memory of a process, shared pages included; 0 if it has just ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def tables(results: dict[str, Measured], *, steps: int) -> str:
    """Markdown: where it was measured, a row per variant, a row per phase."""
    first = next(iter(results.values()))
    length = statistics.mean(
        (row["perf/train_tokens"] - row["rollout/response_tokens"]) / row["rollout/num_samples"]
        for result in results.values()
        for row in result.rows
    )
    lines = [
        place(),
        "",
        f"{PROMPTS} prompts x {GROUP_SIZE} samples, prompts of {length:.0f} tokens on average, responses of at most "
        f"{MAX_NEW_TOKENS} tokens, one rank, one engine; medians of {steps} steps after the first, without evaluation.",
        "",
        "| engine, type | s / step | response tokens | tokens / s | rollout tokens / s | train tokens / s | MFU | K3 | "
        + " | ".join(f"{name}, GiB" for name in ("driver", *ROLES))
        + " |",
        "|---|" + "--:|" * (7 + 1 + len(ROLES)),
    ]
    for variant, result in results.items():
        cells = [
            f"{result.step_s:.1f}",
            shown(result.median("rollout/response_tokens"), ",.0f"),
            f"{result.tokens_per_s:.1f}",
            shown(result.median("rollout/tokens_per_s"), ".0f"),
            shown(result.median("perf/train_tokens_per_s"), ".0f"),
            shown(result.median("perf/mfu"), ".3f"),
            shown(result.median("mismatch/k3"), ".1e"),
            *(shown(gib(result.peaks.get(name)), ".2f") for name in ("driver", *ROLES)),
        ]
        lines.append(f"| {variant.replace('-', ', ')} | {' | '.join(cells)} |")
    lines += ["", f"| seconds of a step | {' | '.join(name.replace('-', ', ') for name in results)} |"]
    lines += ["|---|" + "--:|" * len(results)]
    for key in first.phases:
        seconds = (shown(result.median(key), ".3f") for result in results.values())
        lines.append(f"| {key.removeprefix('time/').removesuffix('_s')} | {' | '.join(seconds)} |")
    lines += ["", "MFU stands on:", ""]
    lines += [f"- {name}: {line}" for name, result in results.items() for line in result.assumptions[:1]]
    return "\n".join(lines)


def gib(size: int | None) -> float | None:
    return None if size is None else size / 2**30


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def place() -> str:
    """Date, machine, versions and revision, in one line."""
    record: dict[str, Any] = environment_record(sys.argv)
    names = ("torch", "transformers", "sglang", "ray")
    versions = ", ".join(f"{name} {record['versions'][name] or 'not installed'}" for name in names)
    git = record["git"] or {"revision": None, "dirty": None}
    revision = f"{(git['revision'] or 'unknown')[:10]}{' with changes' if git['dirty'] else ''}"
    return (
        f"{record['started_at'][:10]}, {record['cpu']}, {record['usable_cores']} cores, "
        f"{record['memory_bytes'] / 2**30:.0f} GiB; Python {record['python']}, {versions}; revision {revision}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="counted steps; one more is taken before them")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="ENGINE-TYPE")
    parser.add_argument("--out", type=Path, help="file for the tables, beside standard output")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that one variant may take")
    arguments = parser.parse_args()
    results: dict[str, Measured] = {}
    for variant in arguments.variants:
        results[variant] = measure(variant, steps=arguments.steps, timeout_s=arguments.timeout)
        sys.stderr.write(f"{variant}: {results[variant].step_s:.1f} s per step\n")
        if arguments.out is not None:  # what is measured stays, whatever becomes of the next variant
            arguments.out.write_text(tables(results, steps=arguments.steps) + "\n", encoding="utf-8")
    sys.stdout.write(tables(results, steps=arguments.steps) + "\n")


if __name__ == "__main__":
    main()
