"""Rows of numbers -> W&B, without ever stopping or delaying a run. Used only by tracker.py.

wandb lives in a process of its own (wandb_process.py). It starts while the run starts; rows are queued and
never waited for; only `finish` waits, with a deadline, and then ends the process. metrics.jsonl is the source of
truth: whatever goes wrong here is one warning and a count.
"""

from __future__ import annotations

import json
import logging
import netrc
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from algorithms.histograms import HistogramArrays
from rollout.processes.child_process import python_module
from trainer.config.recording import TrackingConfig, WandbMode
from trainer.rundir.events import Event

logger = logging.getLogger(__name__)

_FINISH_TIMEOUT_S = 60.0
"""Deadline for uploading what is left when the run ends."""
_GRACE_S = 30.0
"""What the process gets beyond its own deadlines: importing wandb, starting its service, falling back to offline."""
_MAX_QUEUED_ROWS = 10_000
RUN_ID_FILE = "wandb_run_id"


class Histogram(NamedTuple):
    """Mass by bin."""

    mass: list[float]
    edges: list[float]
    """One more than bins, rising, finite."""


class WandbSink:
    """The W&B side of one run. `start`, then `log` and its siblings once per step, then `finish`; none of them raises.

    Args:
        config: mode, project, entity and deadline.
        run_dir: W&B writes to `run_dir/wandb`; the run id is kept in `run_dir/wandb_run_id`.
        name: name of the run in the W&B project.
        record: what W&B shows as the configuration of the run; must hold no secret.
        report: called with each line that the user should see, from a thread of this class.
    """

    def __init__(
        self,
        config: TrackingConfig,
        *,
        run_dir: Path,
        name: str,
        record: Mapping[str, object],
        report: Callable[[str], None],
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._name = name
        self._record = record
        self._report = report
        self._messages: queue.Queue[dict[str, object] | None] = queue.Queue(maxsize=_MAX_QUEUED_ROWS)
        self._process: subprocess.Popen[str] | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        self._finished = False
        self._warned = False
        self._sync_command: str | None = None
        self.mode = WandbMode.disabled
        """What W&B does in this run, once it has started: online, offline or disabled."""
        self.errors = 0
        """Calls that failed and rows that were dropped."""

    def start(self) -> None:
        """Start W&B in the background; the user is told in one line what came of it."""
        modes = self._wanted_modes()
        if modes == [WandbMode.disabled]:
            return
        try:
            self._launch(modes)
        except OSError as error:
            self._failed(f"its process could not be started ({error})")

    def wait_started(self, timeout_s: float) -> bool:
        """Wait until the mode is decided; False if it is not after `timeout_s`."""
        return self._started.wait(timeout_s)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue one row; returns at once."""
        self._queue({"step": step, "numbers": dict(numbers)})

    def log_samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Queue rows of the table of samples, JSON values under the same keys every time; returns at once."""
        self._queue({"step": step, "samples": [dict(row) for row in rows]})

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Queue histograms by name; returns at once."""
        self._queue({"step": step, "histograms": {name: list(each) for name, each in histograms.items()}})

    def alert(self, event: Event) -> None:
        """Queue an alert; returns at once."""
        self._queue({"alert": {"title": f"Parity: {event.kind}", "text": event.text, "level": event.severity.value}})

    def _queue(self, message: dict[str, object]) -> None:
        if self._process is None or self._ended.is_set():
            return
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            self._failed(f"more than {_MAX_QUEUED_ROWS} rows are waiting; rows are dropped")

    def finish(self, *, exit_code: int) -> None:
        """Write everything out and end the W&B run; after a deadline, end its process and say how to upload."""
        process = self._process
        if process is None:
            return
        self._process = None
        deadline = self._config.wandb_timeout_s + _FINISH_TIMEOUT_S + _GRACE_S
        try:
            self._messages.put_nowait({"exit_code": exit_code})
            self._messages.put_nowait(None)
        except queue.Full:
            deadline = 0.0
        in_time = self._ended.wait(deadline)
        _end(process)
        if self.mode is WandbMode.disabled:
            if not in_time:
                self._failed(f"did not start within {deadline:.0f} s")
        elif not self._finished:
            reason = "ended early" if in_time else f"did not finish within {deadline:.0f} s"
            self._failed(f"{reason}; upload what is on disk with: {self._sync_command}")
        elif self.mode is WandbMode.offline:
            self._report(f"W&B: upload this run with: {self._sync_command}")

    def _wanted_modes(self) -> list[WandbMode]:
        """Modes in the order in which they are tried. WANDB_MODE decides if tracking.wandb is auto."""
        wanted = self._config.wandb
        if wanted is WandbMode.auto and os.environ.get("WANDB_MODE") in ("online", "offline", "disabled"):
            wanted = WandbMode[os.environ["WANDB_MODE"]]
        if wanted is WandbMode.auto:
            wanted = WandbMode.online if has_wandb_key() else WandbMode.offline
        return [WandbMode.online, WandbMode.offline] if wanted is WandbMode.online else [wanted]

    def _launch(self, modes: list[WandbMode]) -> None:
        self._messages.put_nowait(
            {
                "modes": [mode.name for mode in modes],
                "project": self._config.project,
                "entity": self._config.entity,
                "name": self._name,
                "id": run_id(self._run_dir),
                "dir": str(self._run_dir),
                "config": self._record,
                "init_timeout_s": self._config.wandb_timeout_s,
                "finish_timeout_s": _FINISH_TIMEOUT_S,
                "pid": os.getpid(),
            }
        )
        with (self._run_dir / "wandb.log").open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(  # noqa: S603 (our own module, no arguments)
                python_module("trainer.tracking.wandb_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                # Tables become files of artifacts, which W&B would keep in the home directory until they are uploaded.
                env={"WANDB_DATA_DIR": str(self._run_dir / "wandb"), **os.environ, "WANDB_SILENT": "true"},
                # Ctrl-C is for the run, which then ends W&B in order.
                start_new_session=True,
            )
        for work, name in ((self._write, "wandb-writer"), (self._read, "wandb-reader")):
            threading.Thread(target=work, args=(self._process,), name=name, daemon=True).start()

    def _write(self, process: subprocess.Popen[str]) -> None:
        """The thread that feeds the process; the pipe may block, the run does not."""
        assert process.stdin is not None
        try:
            with process.stdin as pipe:
                while (message := self._messages.get()) is not None:
                    pipe.write(json.dumps(message) + "\n")
                    pipe.flush()
        except (OSError, TypeError, ValueError) as error:
            if not self._ended.is_set() and self._process is not None:
                self._failed(f"rows cannot be sent to its process ({error}); see {self._run_dir / 'wandb.log'}")

    def _read(self, process: subprocess.Popen[str]) -> None:
        """The thread that hears the process, until it ends."""
        assert process.stdout is not None
        try:
            for line in process.stdout:
                self._hear(json.loads(line))
        finally:
            self._ended.set()
            self._started.set()

    def _hear(self, reply: Mapping[str, object]) -> None:
        if reply["event"] == "ready":
            self._ready(reply)
        elif reply["event"] == "off":
            self.errors += 1
            self._report(f"W&B: off ({reply['reason']})")
        elif reply["event"] == "error":
            self._failed(str(reply["reason"]))
        self._finished = reply["event"] == "finished"
        self._started.set()

    def _ready(self, reply: Mapping[str, object]) -> None:
        self._sync_command = str(reply["sync"])
        self.mode = WandbMode[str(reply["mode"])]
        reasons = reply["reasons"]
        if self.mode is WandbMode.online:
            self._report(f"W&B: online at {reply['url']}")
        elif isinstance(reasons, list) and reasons:
            self.errors += len(reasons)
            self._report(f"W&B: offline ({'; '.join(reasons)}); upload later with: {self._sync_command}")
        else:
            self._report(f"W&B: offline; upload later with: {self._sync_command}")

    def _failed(self, reason: str) -> None:
        self.errors += 1
        if not self._warned:
            self._warned = True
            logger.warning("W&B: %s. The run goes on; metrics.jsonl has everything.", reason)


def mismatch_by_bin(histograms: HistogramArrays) -> dict[str, Histogram]:
    """Where the mismatch is: sum of |Delta| by octave of mu, and of the position in the response."""
    found = {}
    for name, axis in (("log2_probability", histograms.by_probability), ("log2_position", histograms.by_position)):
        mass = [count * (mean or 0.0) for count, mean in zip(axis.counts, axis.abs_logdiff, strict=True)]
        octaves = [float(number) for number in range(len(axis.edges))]
        if axis.edges[0] > axis.edges[1]:
            mass, octaves = mass[::-1], [-number for number in octaves[::-1]]
        found[f"mismatch/{name}"] = Histogram(mass, octaves)
    return found


def run_id(run_dir: Path) -> str:
    """The W&B id of the run in `run_dir`: read from `wandb_run_id`, or made and written there."""
    kept = saved_run_id(run_dir)
    if kept is not None:
        return kept
    made = os.urandom(4).hex()
    keep_run_id(run_dir, made)
    return made


def saved_run_id(run_dir: Path) -> str | None:
    """The W&B id in `run_dir`; None if W&B was never started there."""
    path = run_dir / RUN_ID_FILE
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return text or None


def keep_run_id(run_dir: Path, wandb_run_id: str | None) -> None:
    """Write the id that the W&B run of `run_dir` shall have; None leaves the file as it is."""
    if wandb_run_id is not None:
        (run_dir / RUN_ID_FILE).write_text(wandb_run_id + "\n", encoding="utf-8")


def has_wandb_key() -> bool:
    """Whether a W&B login is at hand, in the environment or in a netrc file; nothing is sent anywhere."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    named = os.environ.get("NETRC")
    paths = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for path in paths:
        try:
            if path.is_file() and netrc.netrc(str(path)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError) as error:
            logger.warning("W&B: %s cannot be read (%s)", path, error)
    return False


def _end(process: subprocess.Popen[str]) -> None:
    """End the process and the services that it started; by then they had their deadline."""
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        # Children first: they cannot be found once their parent is gone.
        services = psutil.Process(process.pid).children(recursive=True)
        for child in [*services, psutil.Process(process.pid)]:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait(10.0)
        psutil.wait_procs(services, timeout=10.0)
