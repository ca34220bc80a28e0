"""Watchdog: finds a suspended rank, and a run that does not get on, names the suspect and writes every stack to a file.

Every call of a worker has a deadline of its own, which ends the run with an error; these deadlines are long, because
a step may be long. The watchdog looks meanwhile:

    a rank is suspended for SUSPENDED_S                       stacks, the name, the rank is killed: its call fails
    no answer for half of the longest deadline                stacks, the name; the run goes on
    no answer for more than the longest deadline              stacks, the name, StalledError in the main thread

An engine that is suspended or hangs is replaced by its group (`rollout/group/engine_group.py`).
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from rollout.group.actor_calls import WorkerProcess, is_here, run_on
from rollout.group.engine_group import EngineGroup
from rollout.processes.child_process import START_TIMEOUT_S
from rollout.processes.process_marks import is_suspended, signal_processes
from rollout.processes.stacks import ASK
from trainer.cluster.policy_group import PolicyGroup
from trainer.config.train import TrainConfig
from trainer.ending.exit_codes import FAILED

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Seconds between two looks. Time is counted in looks: while the driver itself is suspended, nobody is late."""
SUSPENDED_S = 30.0
"""Seconds after which a suspended rank is given up: a debugger or a snapshot of a container suspends for less."""
MARGIN_S = 60.0
"""Seconds beyond the longest deadline, in which the error of the deadline itself arrives."""
STACK_S = 10.0
"""Seconds that a process has to write its stack, which takes milliseconds of an idle core."""

DRIVER = "driver"
NO_STACK = ", which does not write its stack: it is suspended or blocked in the kernel"

_BUSY = re.compile(r'File "[^"]*/(?:trainer/policy|rollout/group)/worker\.py"')
"""Frame of a worker that answers a call; a worker without a call waits in code of Ray."""
_COLLECTIVE = "/torch/distributed/"
_OWN_FRAME = re.compile(r'File "[^"]*/((?:algorithms|rollout|trainer)/[^"]+)", line (\d+) in (\S+)')


class StalledError(RuntimeError):
    """The run did not get on for longer than any call may take; names the suspect and the file with the stacks."""


def longest_call_s(config: TrainConfig) -> float:
    """The longest time in seconds that a healthy run may take between two answers of ranks or engines."""
    policy, rollout = config.policy, config.rollout
    return max(
        policy.step_timeout_s,
        rollout.start_timeout_s,
        rollout.sync_timeout_s,
        rollout.generate_timeout_s + rollout.answer_timeout_s,
        config.reward.timeout_s + START_TIMEOUT_S,
        config.episode.timeout_s,
    )


def suspects(stacks: Mapping[str, str]) -> list[str]:
    """Names of the workers for which the others probably wait, from the stack of each; [] if all workers are idle.

    A worker without a stack does not even hear a signal. Of several workers with a call, those inside a collective wait
    for those outside.
    """
    silent = [name for name, stack in stacks.items() if not stack]
    busy = [name for name, stack in stacks.items() if _BUSY.search(stack)]
    return silent or [name for name in busy if _COLLECTIVE not in stacks[name]] or busy


def place(stack: str, *, thread_with: re.Pattern[str] = _OWN_FRAME) -> str:
    """ " at file:line in function", the innermost frame of Parity in the thread whose frames match; "" without one."""
    for thread in stack.split("\n\n"):
        if thread_with.search(thread) and (frame := _OWN_FRAME.search(thread)):
            return f" at {frame[1]}:{frame[2]} in {frame[3]}"
    return ""


class Watchdog:
    """A thread that watches a run inside the `with` block; see the table at the top of the file."""

    def __init__(
        self, policy: PolicyGroup, engines: EngineGroup, *, file: Path, longest_s: float, say: Callable[[str], None]
    ) -> None:
        """The workers append their stacks to `file` when they are asked to; `say` writes a line for the user."""
        self._policy = policy
        self._engines = engines
        self._file = file
        self._longest_s = longest_s
        self._say = say
        self._verdict = ""
        self._ended = threading.Event()
        self._ending = threading.Lock()
        """Held to end the block, and to send the signal that ends the run, which nobody must hear afterwards."""
        self._thread = threading.Thread(target=self._watch, name="parity-watchdog", daemon=True)
        self._in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Watchdog:
        if self._in_main_thread:
            self._before = signal.signal(ASK, self._raise)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._ending:
            self._ended.set()
        self._thread.join(2 * STACK_S)
        if self._in_main_thread:
            signal.signal(ASK, self._before)

    def _watch(self) -> None:
        """Look every TICK_S until the block ends."""
        suspended_s: defaultdict[str, float] = defaultdict(float)
        progress, silent_s, is_reported = (0, 0), 0.0, False
        while not self._ended.wait(TICK_S):
            for rank in self._policy.processes:
                # Only the machine itself knows the state of a process.
                stops = is_here(rank.node) and is_suspended(rank.mark)
                suspended_s[rank.name] = suspended_s[rank.name] + TICK_S if stops else 0.0
                if suspended_s[rank.name] >= SUSPENDED_S:
                    self._give_up(rank)
                    return
            before, progress = progress, (self._policy.num_answers, self._engines.num_answers)
            silent_s = silent_s + TICK_S if progress == before else 0.0
            is_reported = is_reported and progress == before
            if silent_s >= self._longest_s + MARGIN_S:
                self._end_run(silent_s)
                return
            if silent_s >= self._longest_s / 2 and not is_reported:
                is_reported = True
                self._say(f"{self._look_closely(silent_s)} A longer silence than {self._longest_s:g} s ends the run.")

    def _give_up(self, rank: WorkerProcess) -> None:
        """End a suspended rank, so that the call that waits for it fails with this reason."""
        reason = f"{rank.name} (process {rank.mark.pid}) was suspended for {SUSPENDED_S:g} s (SIGSTOP, or a debugger)"
        self._write_stacks(reason)
        self._say(f"watchdog: {reason} and is ended; the stacks of all processes are in {self._file}")
        self._policy.give_up(rank, f"{reason}; the stacks of all processes are in {self._file}")

    def _end_run(self, silent_s: float) -> None:
        """Raise StalledError in the main thread; end the process if the main thread does not even hear that."""
        self._verdict = self._look_closely(silent_s)
        self._say(self._verdict)
        with self._ending:
            if self._in_main_thread and not self._ended.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, ASK)
        if not self._ended.wait(MARGIN_S):
            self._say("watchdog: the main thread of the run does not react and the process is ended")
            os._exit(FAILED)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._verdict:
            raise StalledError(self._verdict)
        self._say("SIGUSR2: only the watchdog itself uses this signal, and nothing happens")

    def _look_closely(self, silent_s: float) -> str:
        """Write all stacks; one sentence with the suspect."""
        stacks = self._write_stacks(f"no answer from a rank or an engine for {silent_s:g} s")
        driver = stacks.pop(DRIVER)
        names = [f"{name}{place(stacks[name], thread_with=_BUSY) or NO_STACK}" for name in suspects(stacks)]
        waits_for = " and ".join(names) or "itself, for every rank and engine is idle"
        return (
            f"watchdog: no rank and no engine has answered for {silent_s:g} s. The driver{place(driver)} waits for "
            f"{waits_for}. The stacks of all processes are in {self._file}."
        )

    def _write_stacks(self, reason: str) -> dict[str, str]:
        """Let every process append its stack to the file, one after the other -> name -> stack, "" without one."""
        stacks = {DRIVER: ""}
        try:
            with self._file.open("a+", encoding="utf-8", errors="replace") as file:

                def section(title: str) -> int:
                    file.write(f"\n==== {title}\n\n")
                    file.flush()
                    return file.tell()

                section(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}")
                for process in [*self._policy.processes, *self._engines.processes]:
                    start = section(f"{process.name} (process {process.mark.pid})")
                    run_on(process.node, signal_processes, [process.mark], ASK)
                    stacks[process.name] = self._written_since(start)
                start = section(f"{DRIVER} (process {os.getpid()})")
                faulthandler.dump_traceback(file, all_threads=True)
                stacks[DRIVER] = self._written_since(start)
        except OSError as error:
            logger.warning("the stacks cannot be written to %s: %s", self._file, error)
        return stacks

    def _written_since(self, start: int) -> str:
        """The text after `start`, once there is some and nothing is added any more; "" after STACK_S without any."""
        size, deadline = start, time.monotonic() + STACK_S
        while time.monotonic() < deadline:
            time.sleep(STACK_S / 60)
            before, size = size, self._file.stat().st_size
            if size == before > start:
                break
        with self._file.open("rb") as file:
            file.seek(start)
            return file.read().decode("utf-8", errors="replace")
