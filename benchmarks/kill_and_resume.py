"""SIGKILL at random moments, resume, and compare with a run that was not interrupted: weights, metrics, samples.

    python benchmarks/kill_and_resume.py [--kills 20] [--seed 0] [--dir DIR] [--no-background] [key=value ...]

Trains `arithmetic_grpo` with the torch engine and checkpoint.every=1, first without interruption, saving while the step
waits and in the background, then once more with `resume=auto` after every kill. A kill waits for the first or second
time that the run enters a phase (rollout, forward and backward, optimizer step, sync, checkpoint), sleeps a random part
of its usual length, and sends SIGKILL to the run and all its processes at once. Every other attempt saves in the
background. The phase is written to a file by the run itself, in a child of this script that marks the phases of
`StepTimer` and the optimizer steps of the rank; nothing else of the run is changed.

Prints Markdown: one row per kill, then the seconds that saving exposes, then the verdict. Exit code 1 if anything
differs.

lost      seconds of steps that must be done again: since the last checkpoint was finished, or since the attempt began
restart   seconds from the start of the next attempt to its first step
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import trainer.cluster.placement
from trainer.__main__ import main as parity
from trainer.policy.worker import PolicyInfo, PolicyWorker
from trainer.run.step_log import StepTimer
from trainer.rundir.checkpoint import newest_checkpoint

MARKER = "PARITY_KILL_MARKER"
TARGETS = ("rollout", "forward", "optimizer", "sync", "checkpoint")
LENGTH_OF = {"rollout": "time/rollout_s", "forward": "time/train_s", "sync": "time/sync_s"}
OF_ENGINES = ("rounds", "groups_generated", "samples_generated", "generated_tokens", "prompt_tokens")
"""Metrics below rollout/ of what engines did since the row before. With a `schedule` that samples ahead they belong to
the process that sampled: a step that a checkpoint brought along ready counts 0 in the one that trains on it."""
OPTIMIZER_S = 0.01
"""Longer than the optimizer step of so small a model takes."""
POLL_S = 0.0005
ATTEMPT_TIMEOUT_S = 300.0
RECIPE = ("arithmetic_grpo", "rollout=torch", "tracking.wandb=disabled", "checkpoint.every=1", "eval.max_prompts=16")
SMALL = ("batch.prompts_per_step=8", "batch.mini_batch_prompts=4")


@dataclass(frozen=True)
class Kill:
    """One kill and what it cost."""

    target: str
    phase: str
    """Where the run was when the signal was sent."""
    saving: bool
    """Whether this attempt was writing a checkpoint."""
    step: int
    """Completed steps in the newest checkpoint."""
    lost_s: float
    restart_s: float


def mark(phase: str) -> None:
    """Write the phase of the run where the parent looks; 16 bytes at once are never torn."""
    descriptor = os.open(os.environ[MARKER], os.O_WRONLY)
    os.write(descriptor, phase.ljust(16).encode())
    os.close(descriptor)


class MarkedWorker(PolicyWorker):
    """A rank that says when it is in the optimizer step."""

    def setup(self, store_port: int | None = None) -> PolicyInfo:
        info = super().setup(store_port)
        from torch.optim import optimizer

        optimizer.register_optimizer_step_pre_hook(lambda *_: mark("optimizer"))
        optimizer.register_optimizer_step_post_hook(lambda *_: mark("forward"))
        return info


def child(words: list[str]) -> int:
    """The run, with its phases marked."""
    unmarked = StepTimer.phase

    @contextmanager
    def phase(self: StepTimer, name: str) -> Iterator[None]:
        mark("forward" if name == "train" else name)
        with unmarked(self, name):
            yield
        mark("between")

    StepTimer.phase = phase  # type: ignore[assignment, method-assign]
    trainer.cluster.placement.PolicyWorker = MarkedWorker  # type: ignore[misc]
    sys.argv = ["parity", "train", *words]
    return parity()


class Attempt:
    """One process of the run."""

    def __init__(self, words: list[str], *, run_dir: Path, marker: Path, log: Path) -> None:
        self._run_dir = run_dir
        self._leftovers = unfinished(run_dir)
        marker.write_text("starting".ljust(16))
        self._marker = marker
        self._log = log
        self.started = time.monotonic()
        self.first_step: float | None = None
        with log.open("a") as out:
            self.process = subprocess.Popen(  # noqa: S603 - this script again
                [sys.executable, __file__, "--child", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                # Ray gives its workers the lowest priority, so that other work on the machine would stop them.
                env={**os.environ, MARKER: str(marker), "RAY_worker_niceness": "0"},
                start_new_session=True,
            )

    def phase(self) -> str:
        """Where the run is now."""
        return self._marker.read_text().strip()

    def wait_for(self, target: str, *, times: int) -> bool:
        """Wait until the run enters `target` for the `times`-th time; False if it ended before."""
        before, left = "", times
        deadline = time.monotonic() + ATTEMPT_TIMEOUT_S
        while time.monotonic() < deadline:
            phase = self.phase()
            if phase and phase != "starting" and self.first_step is None:
                self.first_step = time.monotonic()
            if phase == target and before != target:
                left -= 1
                if left == 0:
                    return True
            before = phase
            if self.process.poll() is not None:
                return False
            time.sleep(POLL_S)
        raise TimeoutError(f"the run did not reach {target} within {ATTEMPT_TIMEOUT_S:.0f} s; see {self._log}")

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written that was not left unfinished by an earlier attempt."""
        return bool(unfinished(self._run_dir) - self._leftovers)

    def processes(self) -> list[psutil.Process]:
        """The run and everything that it started."""
        run = psutil.Process(self.process.pid)
        return [run, *run.children(recursive=True)]

    def kill(self, processes: list[psutil.Process]) -> None:
        """SIGKILL to all of them."""
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()
        psutil.wait_procs(processes[1:], timeout=10)

    def finish(self) -> int:
        """Wait for the end; the exit code."""
        self.wait_for("never", times=1)
        return self.process.wait()


def unfinished(run_dir: Path) -> set[tuple[str, int]]:
    """Checkpoints without their final name, with the inode that tells them from later ones."""
    return {(path.name, path.stat().st_ino) for path in (run_dir / "checkpoints").glob(".step_*")}


def rows(run_dir: Path, *, without: set[str]) -> list[dict[str, Any]]:
    """metrics.jsonl, a row per step, without what depends on the clock, and without these keys."""
    found: dict[int, dict[str, Any]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)  # an evaluation that failed is made up for in a row of its own
        found.setdefault(row["step"], {}).update(row)
    return [{key: row[key] for key in row if not timed(key) and key not in without} for row in found.values()]


def timed(key: str) -> bool:
    """Whether a metric depends on the clock or on the memory of the process."""
    # Shares of estimated seconds stand on the machine's measured rates, which a busy machine measures at every start.
    prefixes = ("time/", "perf/", "rollout/tail_frac", "rollout/slots_busy_frac", "rollout/prompt_tokens_shared")
    return key.startswith(prefixes) or key.endswith(("_s", "/seconds"))


def seconds(run_dir: Path, key: str) -> list[float]:
    """A metric of the run, where it has it."""
    found = [json.loads(line).get(key) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [value for value in found if value is not None]


def tensors(run_dir: Path) -> dict[str, Any]:
    """Every tensor of the last checkpoint: weights, moments, counters."""
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is None:
        raise SystemExit(f"{run_dir} holds no checkpoint")
    stored = dcp.FileSystemReader(checkpoint.policy_path).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=checkpoint.policy_path, no_dist=True)
    return state


def differences(whole: Path, killed: Path, *, without: set[str]) -> list[str]:
    """What is not equal in the two runs, metrics `without` left out."""
    found = []
    ours, theirs = tensors(killed), tensors(whole)
    if ours.keys() != theirs.keys():
        found.append("names of the tensors")
    found += [f"tensor {key}" for key in ours if key in theirs and not torch.equal(ours[key], theirs[key])]
    expected, logged = rows(whole, without=without), rows(killed, without=without)
    for number, (one, other) in enumerate(zip(expected, logged, strict=False), start=1):
        keys = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
        found += [f"metrics.jsonl row {number}: {', '.join(keys)}"] if keys else []
    if len(expected) != len(logged):
        found.append("number of rows in metrics.jsonl")
    for name in ("samples.jsonl", "histograms.jsonl"):
        if (whole / name).read_bytes() != (killed / name).read_bytes():
            found.append(name)
    return found


def run_whole(words: list[str], run_dir: Path, *, asynchronous: bool, marker: Path) -> None:
    """A run without interruption."""
    if (run_dir / "report.html").exists():
        return  # of an earlier call with the same --dir
    more = [f"run.dir={run_dir}", f"checkpoint.asynchronous={str(asynchronous).lower()}"]
    if Attempt([*words, *more], run_dir=run_dir, marker=marker, log=run_dir.with_suffix(".log")).finish() != 0:
        raise SystemExit(f"the uninterrupted run failed; see {run_dir.with_suffix('.log')}")


def run_killed(words: list[str], run_dir: Path, *, whole: Path, arguments: argparse.Namespace) -> list[Kill]:
    """The same run, killed again and again."""
    draw = random.Random(arguments.seed)  # noqa: S311
    marker, log = run_dir.with_suffix(".phase"), run_dir.with_suffix(".log")
    lengths = {phase: statistics.median(seconds(whole, key)) for phase, key in LENGTH_OF.items()}
    lengths |= {"checkpoint": statistics.median(seconds(whole, "perf/checkpoint_exposed_s")), "optimizer": OPTIMIZER_S}
    kills: list[Kill] = []
    number = 0
    while True:
        more = [f"run.dir={run_dir}", "resume=auto", f"checkpoint.asynchronous={str(number % 2 == 1).lower()}"]
        attempt = Attempt([*words, *more], run_dir=run_dir, marker=marker, log=log)
        target = TARGETS[number % len(TARGETS)]
        if len(kills) == arguments.kills:
            if attempt.finish() != 0:
                raise SystemExit(f"the last attempt failed; see {log}")
            return kills
        if not attempt.wait_for(target, times=draw.randint(1, 2)):
            raise SystemExit(f"attempt {number + 1} ended before it could be killed; see {log}")
        processes = attempt.processes()
        time.sleep(draw.uniform(0.0, lengths[target]))
        phase = attempt.phase()
        attempt.kill(processes)
        kills.append(describe(attempt, run_dir, target=target, phase=phase))
        number += 1


def describe(attempt: Attempt, run_dir: Path, *, target: str, phase: str) -> Kill:
    """What a kill cost, from what lies on the disk after it."""
    now, directory = time.monotonic(), run_dir / "checkpoints"
    finished = sorted(directory.glob("step_*"), key=lambda path: path.name)
    first = attempt.first_step or now
    since = now - first
    if finished:
        since = min(since, time.time() - (finished[-1] / "manifest.json").stat().st_mtime)
    return Kill(
        target=target,
        phase=phase,
        saving=attempt.is_saving(),
        step=int(finished[-1].name.removeprefix("step_")) if finished else 0,
        lost_s=since,
        restart_s=first - attempt.started,
    )


def report(kills: list[Kill], whole: dict[str, Path]) -> None:
    """The tables."""
    out = sys.stdout.write
    out("| kill | aimed at | was in | a save under way | newest checkpoint | lost, s | restart, s |\n")
    out("|--:|---|---|---|--:|--:|--:|\n")
    for number, kill in enumerate(kills, start=1):
        saving = "yes" if kill.saving else "no"
        cells = f"{number} | {kill.target} | {kill.phase} | {saving} | step {kill.step}"
        out(f"| {cells} | {kill.lost_s:.2f} | {kill.restart_s:.1f} |\n")
    lost = [kill.lost_s for kill in kills]
    out(f"\nlost per kill: median {statistics.median(lost):.2f} s, maximum {max(lost):.2f} s\n\n")
    out("| saving | exposed per save, s | written after, s | step, s |\n|---|--:|--:|--:|\n")
    for name, run_dir in whole.items():
        keys = ("perf/checkpoint_exposed_s", "perf/checkpoint_write_s", "time/step_s")
        medians = [f"{statistics.median(seconds(run_dir, key)):.3f}" for key in keys]
        out(f"| {name} | {' | '.join(medians)} |\n")


def main() -> int:
    """Runs, kills, compares; 0 if everything is equal."""
    parser = argparse.ArgumentParser(description="kill and resume")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=None, help="where the runs go; a new temporary one by default")
    parser.add_argument(
        "--background", action=argparse.BooleanOptionalAction, default=True, help="the second whole run"
    )
    parser.add_argument("overrides", nargs="*", help="more overrides of the recipe")
    arguments = parser.parse_args()
    place = arguments.dir or Path(tempfile.mkdtemp(prefix="parity-kill-"))
    place.mkdir(parents=True, exist_ok=True)
    # An attempt completes at most two steps before it is killed.
    words = [*RECIPE, *SMALL, f"run.num_steps={2 * arguments.kills + 2}", *arguments.overrides]
    waiting, background, killed = place / "waiting", place / "background", place / "killed"
    sys.stdout.write(f"seed {arguments.seed}, {arguments.kills} kills, {' '.join(words)}\n\n")
    run_whole(words, waiting, asynchronous=False, marker=place / "phase")
    if arguments.background:
        run_whole(words, background, asynchronous=True, marker=place / "phase")
    kills = run_killed(words, killed, whole=waiting, arguments=arguments)
    report(kills, {"the step waits": waiting} | ({"in the background": background} if arguments.background else {}))
    learned = max(seconds(waiting, "optim/grad_norm"))
    ahead = any(word.startswith("schedule=") and word != "schedule=sync" for word in arguments.overrides)
    without = {f"rollout/{name}" for name in OF_ENGINES} if ahead else set()
    others = [killed, background] if arguments.background else [killed]
    unequal = [line for other in others for line in differences(waiting, other, without=without)]
    if without:
        sys.stdout.write(f"\nnot compared: {', '.join(sorted(without))}\n")
    sys.stdout.write(f"\nlargest gradient norm {learned:.3g}; ")
    sys.stdout.write("bitwise equal: weights, optimizer, metrics, samples, histograms\n" if not unequal else "\n")
    for line in unequal:
        sys.stdout.write(f"DIFFERS: {line}\n")
    return 1 if unequal or not learned > 0 else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(sys.argv[2:]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
