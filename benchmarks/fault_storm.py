"""Faults of all kinds, drawn at random, against a run with two ranks and two engines; then it must equal a quiet run.

    python benchmarks/fault_storm.py [--minutes 30] [--seed 0] [--steps 10] [--dir DIR] [--only FAULT ...]

First `arithmetic_grpo` runs without a fault: the torch engine, one sequence at a time, so that neither the engine that
takes a request nor the requests beside it change a bit; checkpoint.every=1. Its reward is a judge over HTTP, and an
episode has two turns with a tool over HTTP between them (`storm_code.py`). Then round after round, until the minutes
are over, the same run is struck until it has taken all its steps. Each attempt resumes the run, waits for a random
moment (its start-up, or a random part of a random step), and suffers one fault of `Fault`. Faults that a run survives
are followed by further faults in the same attempt; after the others the next attempt resumes.

A round must end with weights, optimizer, metrics, samples and histograms that are bitwise those of the quiet run. After
every attempt no process and no segment of shared memory may be left, and no file in the temporary directory; the next
attempt removes the files of an attempt that was killed. Segments of the whole machine count, so no other program may
make one meanwhile; namespaces of its own keep the storm apart from other programs:

    unshare --mount --pid --fork --mount-proc sh -c 'mount -t tmpfs tmpfs /dev/shm; make chaos; exit $?'

The shell there is the parent of processes that lost their own, and collects them: Ray's workers do not end before that.

Every attempt must end within its deadline, with an exit code that its fault allows. Prints Markdown: one row per fault,
then the counts and the verdict. Exit code 1 if anything differs or is left.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil
from aiohttp import web
from kill_and_resume import differences, seconds

from trainer.rundir.run_dir import logged_step

MARK = "PARITY_STORM"
"""Environment variable that every process of the run inherits."""
PLACE = "PARITY_STORM_PLACE"
"""Environment variable with the storm's directory, for `storm_code.py`: addresses and orders are files in it."""
SHM = Path("/dev") / "shm"
CALLS = ("timeout_s=8", "max_tries=6", "retry_pause_s=0.5", "outage_wait_s=20")
"""Keys of calls. Fewer than eight calls that fail are no outage, but their tries last for 15 s, longer than AWAY_S."""
RECIPE = (
    "arithmetic_grpo",
    "rollout=torch",
    "rollout.num_engines=2",
    "rollout.max_batch_size=1",
    "rollout.answer_timeout_s=5",
    "rollout.max_restarts=10",
    "rollout.start_timeout_s=150",
    "policy.start_timeout_s=150",
    "policy.num_workers=2",
    "tracking.wandb=disabled",
    "checkpoint.every=1",
    "checkpoint.keep=3",
    "batch.prompts_per_step=4",
    "batch.group_size=4",
    "batch.mini_batch_prompts=2",
    "eval.max_prompts=4",
    "model.num_steps=120",
    "collect.max_invalid_fraction=0",  # a run that lost a response would not be equal, so it must end instead
    "collect.min_failed=0",
    "reward.max_failed_fraction=0",
    "reward.min_failed=0",
    "episode.num_workers=2",
    *(f"{section}.{key}" for section in ("reward", "episode") for key in CALLS),
)
NOT_COMPARED = frozenset(
    {"rollout/engine_restarts", "rollout/redispatched", "reward/retries", "episode/restarted"}
    | {
        f"{section}/{kind}"
        for section in ("reward", "episode")
        for kind in ("timeouts", "errors", "crashes", "outage_s")
    }
)
"""Metrics that count the faults themselves."""
AWAY_S = 6.0
"""Longest time after which a service that is away comes back."""
USER_CODE = Path(__file__).with_name("storm_code.py")
END_S = 240.0
"""Deadline for the end of an attempt whose fault ends it, and for each further step of one that goes on."""
GRACE_S = 90.0
"""Deadline for the last process of an attempt to end after the run itself. Two agents of Ray report for up to a minute
to a control server that was killed, before they end."""
POLL_S = 0.05


class Fault(Enum):
    """One kind of fault. The value describes the fault in the table."""

    kill_all = "SIGKILL to every process"
    kill_driver = "SIGKILL to the driver"
    kill_rank = "SIGKILL to a rank"
    stop_rank = "SIGSTOP to a rank"
    kill_engine = "SIGKILL to an engine"
    stop_engine = "SIGSTOP to an engine"
    kill_reward = "SIGKILL to a reward process"
    kill_rollout = "SIGKILL to a process of the rollout function"
    judge_hang = "a call of the judge hangs in an await"
    judge_raise = "a call of the judge raises"
    judge_exit = "a call of the judge ends its process"
    judge_flood = "a call of the judge prints 4 MiB, and writes garbage to every descriptor"
    judge_away = "the judge refuses connections for up to 6 s"
    judge_gone = "the judge refuses connections for longer than reward.outage_wait_s"
    tool_hang = "a call of the rollout function hangs in an await"
    tool_raise = "a call of the rollout function raises"
    tool_exit = "a call of the rollout function ends its process"
    tool_flood = "a call of the rollout function prints 4 MiB, and writes garbage to every descriptor"
    tool_away = "the tool refuses connections for up to 6 s"
    tool_gone = "the tool refuses connections for longer than episode.outage_wait_s"
    term = "SIGTERM to the run"
    interrupt_twice = "SIGINT, and again a moment later"
    full_disk = "no room on the disk for a file of a rank"
    flip_bit = "SIGKILL, then one bit of the newest checkpoint flipped"
    cut_file = "SIGKILL, then a file of the newest checkpoint cut"
    torn_row = "SIGKILL, then half a row at the end of a row file"


USER_FAULTS = {fault: fault.name.split("_") for fault in Fault if fault.name.startswith(("judge_", "tool_"))}
"""Faults of user code -> (service, what is wrong)."""
MAY_SURVIVE = frozenset({Fault.full_disk})
"""Faults after which the run goes on, or ends with exit code 1 where the fault struck the last save."""
EXIT_CODES = {
    Fault.kill_all: {-signal.SIGKILL},
    Fault.kill_driver: {-signal.SIGKILL},
    Fault.kill_rank: {1},
    Fault.stop_rank: {1},
    Fault.term: {0, 128 + signal.SIGTERM},
    Fault.interrupt_twice: {0, 128 + signal.SIGINT},
    Fault.full_disk: {1},
    Fault.flip_bit: {-signal.SIGKILL},
    Fault.cut_file: {-signal.SIGKILL},
    Fault.torn_row: {-signal.SIGKILL},
    Fault.judge_gone: {1, 2},
    Fault.tool_gone: {1},
}
"""Exit codes that a fault allows; 2 if the trial before a start finds no judge. 0 is always allowed: the run may have
taken its last step meanwhile."""
SURVIVED = frozenset(Fault) - EXIT_CODES.keys()
"""Faults after which the run must go on."""
ENDS_A_START = {1, -signal.SIGTERM, -signal.SIGINT}
"""Exit codes that every fault allows while the run starts: an engine or a rank that dies then ends the run, and a
signal that comes before the run listens ends the process itself."""


class StormError(Exception):
    """The run did something that no fault excuses, and its round cannot go on."""


class Service:
    """A server on the loopback that says what it is told. Its port stays its own while it is away."""

    def __init__(self, name: str, place: Path) -> None:
        self.name, self.place = name, place
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._port.bind(("127.0.0.1", 0))
        (place / name).write_text("http://{}:{}/".format(*self._port.getsockname()))
        self._process: multiprocessing.Process | None = None
        self.come_back()

    def come_back(self) -> None:
        """Serve, if it does not."""
        if self._process is None:
            self._process = multiprocessing.Process(target=self._serve, daemon=True)
            self._process.start()

    def go_away(self) -> None:
        """Break all connections, and refuse others."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def go_wrong(self, wrong: str, attempt: Attempt, draw: random.Random) -> str | None:
        """Apply a fault of USER_FAULTS -> ""; None if the run ended before."""
        if wrong in ("away", "gone"):
            self.go_away()
            if wrong == "away":
                time.sleep(draw.uniform(1.0, AWAY_S))
                self.come_back()
            return ""
        order = self.place / f"{self.name}_{wrong}"
        order.touch()
        is_taken = attempt.wait(lambda: not order.exists(), timeout_s=END_S, action=f"take the order {order.name}")
        order.unlink(missing_ok=True)
        return "" if is_taken else None

    def _serve(self) -> None:
        async def say(request: web.Request) -> web.Response:
            return web.Response(text=await request.text())

        logging.disable()  # what the server logs about the garbage of a flood
        app = web.Application()
        app.add_routes([web.post("/", say)])
        address, port = self._port.getsockname()
        web.run_app(app, host=address, port=port, reuse_port=True, print=None, access_log=None)


@dataclass(frozen=True)
class Storm:
    """What is drawn from, and what came of it, in all rounds."""

    faults: Sequence[Fault]
    draw: random.Random
    start_s: float
    """Seconds from the start of the quiet run to the end of its first step."""
    services: dict[str, Service]
    strikes: Counter[Fault]
    wrong: list[str]
    """Sentences about what should not be."""


class Attempt:
    """One process of the run, from its start or resumption on."""

    def __init__(self, words: Sequence[str], *, run_dir: Path, scratch: Path, token: str) -> None:
        self.run_dir = run_dir
        self._token = token
        self._log = run_dir.with_suffix(".log")
        with self._log.open("a") as out:
            self.process = subprocess.Popen(  # noqa: S603 - Parity's own command line
                [sys.executable, "-m", "trainer", "train", *words, f"run.dir={run_dir}", "resume=auto"],
                stdout=out,
                stderr=subprocess.STDOUT,
                # Ray and SGLang rename their processes; SPT_NOENV keeps the environment of those readable.
                env={**os.environ, MARK: token, "TMPDIR": str(scratch), "SPT_NOENV": "1", "RAY_worker_niceness": "0"},
                start_new_session=True,
            )

    def rows(self) -> int:
        """The newest step in metrics.jsonl."""
        return logged_step(self.run_dir)

    def wait(self, until: Callable[[], bool], *, timeout_s: float, action: str) -> bool:
        """Wait for a condition; False if the process ended before. Raises StormError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not until():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise StormError(f"the run did not {action} within {timeout_s:.0f} s; see {self._log}")
            time.sleep(POLL_S)
        return True

    def end(self) -> int:
        """Wait for the end -> exit code."""
        self.wait(lambda: False, timeout_s=END_S, action="end")
        return self.process.wait()

    def processes(self, *words: str) -> list[psutil.Process]:
        """Processes of this attempt whose command line holds one of `words`; all processes without `words`."""
        found = []
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
                ours = process.environ().get(MARK) == self._token and process.status() != psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            if ours and (not words or any(word in line for word in words)):
                found.append(process)
        return sorted(found, key=lambda process: process.pid)


def strike(fault: Fault, attempt: Attempt, storm: Storm) -> str | None:
    """Apply `fault` -> the process or file that it struck; None if there is nothing that it could strike now."""
    draw = storm.draw
    if fault in USER_FAULTS:
        service, wrong = USER_FAULTS[fault]
        return storm.services[service].go_wrong(wrong, attempt, draw)
    roles = {
        Fault.kill_rank: ("ray::PolicyWorker", signal.SIGKILL),
        Fault.stop_rank: ("ray::PolicyWorker", signal.SIGSTOP),
        Fault.kill_engine: ("ray::RolloutWorker", signal.SIGKILL),
        Fault.stop_engine: ("ray::RolloutWorker", signal.SIGSTOP),
        Fault.kill_reward: ("rollout.rewards.child", signal.SIGKILL),
        Fault.kill_rollout: ("rollout.episodes.child", signal.SIGKILL),
        Fault.full_disk: ("ray::PolicyWorker", None),
    }
    if fault in roles:
        word, number = roles[fault]
        victims = attempt.processes(word)
        if not victims:
            return None
        victim = draw.choice(victims)
        try:
            if number is None:
                allow_bytes(victim, 4096)
            else:
                victim.send_signal(number)
        except psutil.NoSuchProcess:
            return None
        return f"process {victims.index(victim) + 1} of {len(victims)}"
    run = psutil.Process(attempt.process.pid)
    match fault:
        case Fault.term:
            run.send_signal(signal.SIGTERM)
        case Fault.interrupt_twice:
            run.send_signal(signal.SIGINT)
            time.sleep(draw.uniform(0.0, 1.0))
            run.send_signal(signal.SIGINT)
        case Fault.kill_driver:
            run.kill()
        case _:
            for process in [run, *run.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
    return ""


def allow_bytes(process: psutil.Process, limit: int) -> None:
    """Let `process` write files up to `limit` bytes: the kernel refuses more with EFBIG."""
    _, hard = process.rlimit(resource.RLIMIT_FSIZE)
    process.rlimit(resource.RLIMIT_FSIZE, (limit, hard))


def damage(fault: Fault, run_dir: Path, draw: random.Random) -> str:
    """Damage what lies in the run directory of a run that has ended -> the file."""
    if fault is Fault.torn_row:
        path = run_dir / draw.choice(["metrics.jsonl", "samples.jsonl", "histograms.jsonl"])
        if not path.is_file():
            return "nothing to tear"
        rows = path.read_bytes()
        last = rows.rfind(b"\n", 0, len(rows) - 1) + 1
        path.write_bytes(rows + rows[last : last + max(1, (len(rows) - last) // 2)])
        return path.name
    saved = sorted((run_dir / "checkpoints").glob("step_*"))
    if len(saved) < 2:  # the only checkpoint is left alone: a run whose checkpoints are all bad refuses to go on
        return "nothing to damage"
    path = draw.choice(sorted(path for path in saved[-1].rglob("*") if path.is_file() and path.stat().st_size))
    content = bytearray(path.read_bytes())
    if fault is Fault.cut_file:
        path.write_bytes(content[: draw.randrange(len(content))])
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
    return f"{path.relative_to(saved[-1].parent)}"


def left_behind(attempt: Attempt, scratch: Path, segments: set[str], *, was_killed: bool) -> list[str]:
    """Processes, segments and files that an attempt left; waits until the last process has ended.

    Files of a run that was killed are removed by the next run, so they do not count yet.
    """
    deadline = time.monotonic() + GRACE_S
    while (processes := attempt.processes()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    left = [f"process {process.pid} {' '.join(process.cmdline())[:100]}" for process in processes]
    left += [f"segment {name}" for name in sorted(set(os.listdir(SHM)) - segments)]
    return left + [f"file {path.name}" for path in sorted(scratch.iterdir()) if not was_killed]


def storm_round(storm: Storm, number: int, words: Sequence[str], run_dir: Path) -> None:
    """Strike one run until it has taken all its steps. Raises StormError."""
    scratch = run_dir.with_suffix(".tmp")
    scratch.mkdir()
    for tries in range(1, 101):
        for service in storm.services.values():
            service.come_back()
        segments = set(os.listdir(SHM))
        attempt = Attempt(words, run_dir=run_dir, scratch=scratch, token=f"{os.getpid()}.{number}.{tries}")
        _strike_attempt(storm, number, attempt)
        code = attempt.end()
        left = left_behind(attempt, scratch, segments, was_killed=code == -signal.SIGKILL)
        storm.wrong.extend(f"round {number}, attempt {tries} left {thing}" for thing in left)
        if code == 0:
            return
    raise StormError("100 attempts did not complete the run")


def _strike_attempt(storm: Storm, number: int, attempt: Attempt) -> None:
    """Strike one attempt until it has ended, and print a row per fault. Raises StormError."""
    ended, starting = False, storm.draw.random() < 0.15
    while not ended:
        fault = storm.draw.choice(storm.faults)
        if not _reach_moment(attempt, storm.draw, start_s=storm.start_s if starting else None):
            return
        struck = strike(fault, attempt, storm)
        if struck is None:
            continue
        step = attempt.rows()
        storm.strikes[fault] += 1
        ended, outcome = _outcome(fault, attempt, step, starting=starting)
        if ended and fault in (Fault.flip_bit, Fault.cut_file, Fault.torn_row):
            struck = damage(fault, attempt.run_dir, storm.draw)
        sys.stdout.write(f"| {number} | {fault.value} | {step} | {f'{struck}: ' if struck else ''}{outcome} |\n")
        sys.stdout.flush()
        starting = False


def _reach_moment(attempt: Attempt, draw: random.Random, *, start_s: float | None) -> bool:
    """Wait for a random moment: within `start_s` from now, or in one of the next two steps; False if the run ended."""
    if start_s is not None:
        aim = time.monotonic() + draw.uniform(0.0, start_s)
        return attempt.wait(lambda: time.monotonic() > aim, timeout_s=END_S, action="start")
    rows = attempt.rows() + draw.randint(1, 2)
    # A step that is done again replaces its row: the number of rows can stand still, but not for long.
    if not attempt.wait(lambda: attempt.rows() >= rows, timeout_s=END_S, action=f"reach step {rows}"):
        return False
    aim = time.monotonic() + draw.uniform(0.0, 2.0)
    return attempt.wait(lambda: time.monotonic() > aim, timeout_s=END_S, action="go on")


def _outcome(fault: Fault, attempt: Attempt, step: int, *, starting: bool) -> tuple[bool, str]:
    """Wait for what a fault leads to -> (the attempt has ended, description). Raises StormError."""
    if fault in SURVIVED | MAY_SURVIVE:
        goes_on = attempt.wait(lambda: attempt.rows() > step, timeout_s=END_S, action=f"go on after {fault.value}")
        if fault is Fault.full_disk:
            for process in attempt.processes("ray::PolicyWorker"):
                with suppress(psutil.NoSuchProcess):
                    allow_bytes(process, resource.RLIM_INFINITY)
        if goes_on:
            return False, "went on"
    allowed = {0} | EXIT_CODES.get(fault, set()) | (ENDS_A_START if starting else set())
    code = attempt.end()
    if code not in allowed:
        raise StormError(f"exit code {code} after {fault.value}; expected one of {sorted(allowed)}")
    return True, f"exit code {code}"


def main() -> int:
    """A quiet run, then storms until the time is over; 0 if all of them end like the quiet run."""
    parser = argparse.ArgumentParser(description="random faults against a run")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dir", type=Path, default=None, help="where the runs go; a new temporary one by default")
    parser.add_argument("--only", nargs="*", choices=[fault.name for fault in Fault], help="only these faults")
    arguments = parser.parse_args()
    place: Path = (arguments.dir or Path(tempfile.mkdtemp(prefix="parity-storm-"))).resolve()
    place.mkdir(parents=True, exist_ok=True)
    os.environ[PLACE] = str(place)
    services = {name: Service(name, place) for name in ("judge", "tool")}
    functions = [f"reward.function={USER_CODE}:reward", f"episode.function={USER_CODE}:rollout"]
    words = [*RECIPE, f"run.num_steps={arguments.steps}", *functions]
    faults = [Fault[name] for name in arguments.only] if arguments.only else list(Fault)
    sys.stdout.write(f"seed {arguments.seed}, {arguments.minutes:g} minutes, {' '.join(words)}\n\n")

    begun = time.monotonic()
    quiet = place / "quiet"
    scratch = place / "quiet.tmp"
    scratch.mkdir()
    attempt = Attempt(words, run_dir=quiet, scratch=scratch, token=f"{os.getpid()}.quiet")
    attempt.wait(lambda: attempt.rows() > 0, timeout_s=END_S, action="take a step")
    start_s = time.monotonic() - begun
    if attempt.end() != 0:
        raise SystemExit(f"the quiet run failed; see {quiet.with_suffix('.log')}")
    sys.stdout.write("| round | fault | steps logged | outcome |\n|--:|---|--:|---|\n")
    draw = random.Random(arguments.seed)  # noqa: S311
    storm = Storm(faults, draw, start_s, services, strikes=Counter(), wrong=[])
    rounds = 0
    while time.monotonic() < begun + 60 * arguments.minutes:
        rounds += 1
        run_dir = place / f"storm_{rounds:03d}"
        try:
            storm_round(storm, rounds, words, run_dir)
            unequal = differences(quiet, run_dir, without=set(NOT_COMPARED))
            storm.wrong.extend(f"round {rounds} DIFFERS: {line}" for line in unequal)
        except StormError as error:
            storm.wrong.append(f"round {rounds}: {error}")
    sys.stdout.write("\n| fault | times |\n|---|--:|\n")
    sys.stdout.writelines(f"| {fault.value} | {storm.strikes[fault]} |\n" for fault in faults)
    learned = max(seconds(quiet, "optim/grad_norm"))
    minutes = (time.monotonic() - begun) / 60
    sys.stdout.write(f"\n{rounds} rounds, {storm.strikes.total()} faults, {minutes:.0f} minutes; ")
    sys.stdout.write(f"largest gradient norm {learned:.3g}; ")
    sys.stdout.write("every round is bitwise equal to the quiet run, nothing was left\n" if not storm.wrong else "\n")
    sys.stdout.writelines(f"WRONG: {line}\n" for line in storm.wrong)
    return 1 if storm.wrong or not learned > 0 else 0


if __name__ == "__main__":
    sys.exit(main())
