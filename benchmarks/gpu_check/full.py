"""The list for a host with SGLang or vLLM: engines (`gpu_check/full_engine.py`, `gpu_check/vllm_engine.py`), and whole
runs of the command `parity`.

A run on a GPU shares it between one rank and one engine. Without the directory of a model in GPU_CHECK_MODEL the runs
train the built-in arithmetic model, which needs no file and no network.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil

from gpu_check import full_engine, vllm_engine
from gpu_check.checks import Check
from gpu_check.host import Host
from gpu_check.rows import Row, judged, noted
from rollout.sglang.config import SGLangConfig
from rollout.vllm.config import VLLMConfig
from trainer.rundir.rows import read_rows

MODEL_VARIABLE = "GPU_CHECK_MODEL"
RUN_TIMEOUT_S = 1200.0
KILL_WAIT_S = 300.0
"""Seconds until the run that will be killed into must have taken its first step."""
STEPS = (5, 20)
CPU_STEPS = (2,)
EXACT_STEPS = 2
SCHEDULER = "scheduler"
"""Part of the name of SGLang's process that samples."""


def listed() -> list[Check]:
    """All checks of the engines that are installed, cheapest first; those of SGLang if none is."""
    of_vllm = [
        Check(number=30, name="vLLM's engine", cost_s=240, run=vllm_engine.engine),
        Check(number=31, name="runs with vLLM", cost_s=600, run=partial(runs, number="31", rollout="vllm")),
    ]
    has_vllm = VLLMConfig.missing_package() is None
    checks = [*_of_sglang()] if SGLangConfig.missing_package() is None or not has_vllm else []
    return sorted([*checks, *(of_vllm if has_vllm else ())], key=lambda check: (check.cost_s, check.number))


def _of_sglang() -> list[Check]:
    return [
        Check(number=20, name="starts", cost_s=400, run=full_engine.starts),
        Check(number=21, name="digests", cost_s=120, run=full_engine.digests),
        Check(number=22, name="sleep and wake", cost_s=120, run=full_engine.sleeping),
        Check(number=23, name="runs on a shared GPU", cost_s=600, run=runs),
        Check(number=24, name="size of the cache", cost_s=240, run=full_engine.cache_size),
        Check(number=25, name="kill in mid-rollout", cost_s=300, run=killed),
        Check(number=26, name="two ranks of an engine", cost_s=150, run=full_engine.two_ranks),
        Check(number=27, name="exact arithmetic", cost_s=300, run=exact),
    ]


def words(host: Host, run_dir: Path, *, steps: int) -> list[str]:
    """The words after `parity train`."""
    common = [f"run.num_steps={steps}", f"run.dir={run_dir}", "tracking.wandb=disabled", "policy.num_workers=1"]
    model = os.environ.get(MODEL_VARIABLE)
    if model:
        source = "word_problems:one_step@"
        recipe = ["gsm8k_grpo_qwen2.5_0.5b", f"model.path={model}", "batch.prompts_per_step=32"]
        recipe += ["batch.mini_batch_prompts=16", f"data.train_path={source}train", f"data.eval_path={source}eval"]
    else:
        recipe = ["arithmetic_grpo", "model.num_steps=120", "eval.max_prompts=32"]
    shared = ["policy.gpus_per_worker=0.5", "rollout.gpus_per_engine=0.5", "rollout.start_timeout_s=1200"]
    return [*recipe, *common, *host.pick(shared, ["rollout.num_engines=1"])]


def runs(host: Host, *, number: str = "23", rollout: str = "sglang") -> Iterator[Row]:
    """Runs of the whole system to their ends, with the mismatch and the seconds of the last step."""
    for steps in host.pick(STEPS, CPU_STEPS):
        for residency in host.pick(("always", "never"), ("auto",)):
            run_dir = host.out / f"run_{rollout}_{steps}_{residency}"
            command = [*words(host, run_dir, steps=steps), f"cluster.residency={residency}", "run.resume=clean"]
            command.append(f"rollout={rollout}")
            process = _start(command, run_dir.with_suffix(".log"))
            status = _end(process, RUN_TIMEOUT_S)
            rows = read_rows(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").is_file() else []
            last = rows[-1] if rows else {}
            shown = ", ".join(f"{name} {last[name]:.3g}" for name in SHOWN if last.get(name) is not None)
            yield judged(
                number,
                f"{command[0]}, rollout={rollout}, {steps} steps, cluster.residency={residency}",
                expected=f"exit status 0 after step {steps}",
                measured=f"exit status {status} after step {last.get('step', 0)}; {shown}",
                ok=status == 0 and last.get("step") == steps,
                reason=f"see {run_dir.with_suffix('.log').name}",
            )


def exact(host: Host) -> Iterator[Row]:
    """Runs with rollout.exact=true: not one log-prob of the engine may differ from the trainer's in a bit."""
    for dtype in ("bfloat16", "float32"):
        run_dir = host.out / f"run_exact_{dtype}"
        own = ["rollout.exact=true", f"policy.dtype={dtype}", f"rollout.dtype={dtype}", "run.resume=clean"]
        process = _start([*words(host, run_dir, steps=EXACT_STEPS), *own], run_dir.with_suffix(".log"))
        status = _end(process, RUN_TIMEOUT_S)
        rows = read_rows(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").is_file() else []
        gaps = [row["mismatch/abs_logdiff_max"] for row in rows if row["step"]]
        yield judged(
            "27",
            f"{EXACT_STEPS} steps in {dtype} with rollout.exact=true",
            expected="exit status 0, largest difference of two log-probs 0 in every step",
            measured=f"exit status {status}, {', '.join(f'{gap:.1e}' for gap in gaps) or 'no step'}",
            ok=status == 0 and gaps == [0.0] * EXACT_STEPS,
            reason=f"the probe names what differs: see {run_dir.with_suffix('.log').name}",
        )


SHOWN = ("mismatch/k3", "mismatch/k3_floor", "time/rollout_s", "time/train_s", "time/sync_s", "perf/gpu_swap_s")
"""Metrics of a run that a row shows."""


def killed(host: Host) -> Iterator[Row]:
    """SIGKILL to SGLang's sampling process between two steps; the run must start another engine and end well."""
    steps, run_dir = host.pick(6, 4), host.out / "run_killed"
    process = _start([*words(host, run_dir, steps=steps), "run.resume=clean"], run_dir.with_suffix(".log"))
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + KILL_WAIT_S
    victim: psutil.Process | None = None
    while victim is None and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
        if metrics.is_file() and any(row["step"] >= 1 for row in read_rows(metrics)):
            victim = _scheduler(process.pid)
    if victim is not None:
        victim.send_signal(signal.SIGKILL)
    status = _end(process, RUN_TIMEOUT_S)
    rows = read_rows(metrics) if metrics.is_file() else []
    restarts = sum(row.get("rollout/engine_restarts") or 0 for row in rows)
    last = max((row["step"] for row in rows), default=0)
    yield judged(
        "25",
        "kill -9 of SGLang in a run",
        expected=f"1 restart, exit status 0 after step {steps}",
        measured=f"{restarts:g} restarts, exit status {status} after step {last}",
        ok=victim is not None and status == 0 and restarts == 1 and last == steps,
        reason=f"see {run_dir.with_suffix('.log').name}" if victim else "no process of SGLang was found to kill",
    )
    if rows:
        slowest = max(row.get("time/rollout_s") or 0.0 for row in rows)
        yield noted("25", "longest rollout of that run", measured=f"{slowest:.1f} s")


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """`parity train` with its output in `log`."""
    with log.open("wb") as out:
        return subprocess.Popen(  # noqa: S603 - our own interpreter and words
            [sys.executable, "-m", "trainer", "train", *command], stdout=out, stderr=subprocess.STDOUT
        )


def _end(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit status; None if it had to be ended."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def _scheduler(parent: int) -> psutil.Process | None:
    """SGLang's sampling process below `parent`, if there is one; Ray's workers are below it too."""
    for process in psutil.Process(parent).children(recursive=True):
        try:
            if SCHEDULER in process.name():
                return process
        except psutil.Error:
            continue
    return None
