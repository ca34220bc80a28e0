"""Owns the process tree of one SGLang server: arguments and environment -> running server -> nothing left.

The process runs `rollout/sglang/launch.py`; `rollout/sglang/client.py` calls the server; `rollout/sglang/engine.py`
holds one SGLangServer per engine.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rollout.engine import EngineError
from rollout.processes.child_process import python_module
from rollout.processes.inherited import variables
from rollout.processes.scratch import Scratch
from rollout.sglang.client import HOST, ClientError, SGLangClient

LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 256 * 1024
SPAWN_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 12.0
"""Seconds that killed processes have to give back their memory; less than a group waits for this error (GRACE_S)."""
TRACKER_TIMEOUT_S = 5.0
"""Seconds that Python's resource tracker outlives the other processes, to remove the semaphores that they used."""
WATCH_INTERVAL_S = 0.2
NOTICE_TIMEOUT_S = 5.0
"""Seconds that an error waits, after a connection broke, for the end of the server, to report its cause."""
READY_INTERVAL_S = 0.25
PORTS = range(20_000, 32_000)
"""Ports below the range that the kernel gives to outgoing connections, so that no connection can take a chosen port."""
LOG_NOISE = re.compile(r"nanobind|leaked (function|type|instance|keep_alive)|\.\.\. skipped remainder|^\s*$")
"""Lines that a dying server prints by the hundred and that explain no error."""

logger = logging.getLogger(__name__)


class SGLangServer:
    """One server, started once and stopped for good. Its random keys exist only in this object and the server."""

    def __init__(
        self, *, index: int, log_dir: Path, environment: Mapping[str, str], server_args: Mapping[str, Any]
    ) -> None:
        """`index` is the index of the engine; the log is <log_dir>/engine-<index>.log.

        `environment` is added to the environment of this process; `server_args` are SGLang's ServerArgs by name,
        without host, port and keys.
        """
        self._index = index
        self._log_path = log_dir / f"engine-{index}.log"
        self._environment = environment
        self._api_key = secrets.token_urlsafe(32)
        self._admin_api_key = secrets.token_urlsafe(32)
        self._held_port = hold_port()
        self._server_args = {
            **server_args,
            "host": HOST,
            "port": self._held_port.getsockname()[1],
            "api_key": self._api_key,
            "admin_api_key": self._admin_api_key,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._members: list[psutil.Process] = []
        self._parts: list[psutil.Process] = []
        """Processes without which the server cannot serve."""
        self._scratch: Scratch | None = None
        self._survivors: set[int] = set()
        self._log_start = 0
        """Size of the log when this server began to write to it."""
        self._end_noticed = threading.Event()
        self._end_cause = ""
        """Cause of the end; set before the event `_end_noticed`."""
        self._ended = threading.Event()
        """Set when no process of the server runs any more, or one cannot be killed."""
        self._stopping = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self._server_args['port']}"

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the server at the time when it became ready."""
        return tuple(member.pid for member in self._members)

    def client(self) -> SGLangClient:
        return SGLangClient(address=self.address, api_key=self._api_key, admin_api_key=self._admin_api_key)

    @property
    def end_cause(self) -> str:
        """Description of the server's end; empty while it runs."""
        return self._end_cause if self._end_noticed.is_set() else ""

    def start(self, *, timeout_s: float) -> None:
        """Start the processes and return when the server answers. Raises EngineError, after ending all processes."""
        deadline = time.monotonic() + timeout_s
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._scratch = Scratch()
        except OSError as error:
            raise EngineError(f"engine {self._index} (sglang) start: {error}") from error
        atexit.register(self.stop)
        try:
            self._spawn()
            self._wait_ready(deadline, timeout_s)
        except BaseException:
            self.stop()
            raise
        self._members = self._session()
        self._scratch.note_segments(self._members)
        # Helpers of helpers may come and go; SGLang's scheduler and detokenizer are direct children.
        self._parts = [m for m in self._members if m.ppid() == self._leader and not _is_tracker(m)]

    def stop(self) -> None:
        """Kill every process of the server and remove their traces; safe to call twice.

        Raises EngineError if a process survives SIGKILL for STOP_TIMEOUT_S.
        """
        with self._stopping:
            if self._process is not None and not self._ended.is_set():
                # The keeper thread notices the end and finishes the work.
                self._kill_all()
                self._ended.wait(timeout=2 * STOP_TIMEOUT_S)
            if self._scratch is not None:
                self._scratch.remove()
            self._held_port.close()
            atexit.unregister(self.stop)
            if self._survivors or (self._process is not None and not self._ended.is_set()):
                raise EngineError(
                    f"engine {self._index} (sglang) stop: processes {sorted(self._survivors)} still exist "
                    f"{STOP_TIMEOUT_S:.0f} s after SIGKILL; a driver call may be stuck"
                )

    def error(self, phase: str, cause: str, *, policy_version: int, lost: bool = False) -> str:
        """Text of an error: engine, policy version, phase, cause, the cause of the server's end, the end of its log.

        `lost` is True if the connection broke, which is often noticed before the end of the process.
        """
        text = f"engine {self._index} (sglang, policy version {policy_version}) {phase}: {cause}"
        if self._end_noticed.wait(timeout=NOTICE_TIMEOUT_S if lost else 0.0):
            text += f". {self._end_cause}"
            self._ended.wait(timeout=STOP_TIMEOUT_S)
        return f"{text}\nlast {LOG_TAIL_LINES} lines of {self._log_path}:\n{self._log_tail()}"

    def _spawn(self) -> None:
        """Start the process from a thread that stays alive: the kernel ends the process together with that thread."""
        started: Future[None] = Future()
        name = f"engine-{self._index}-keeper"
        threading.Thread(target=self._keep, args=(started,), name=name, daemon=True).start()
        try:
            started.result(SPAWN_TIMEOUT_S)
        except OSError as error:  # a TimeoutError is one too
            cause = str(error) or f"no process after {SPAWN_TIMEOUT_S:.0f} s"
            raise EngineError(f"engine {self._index} (sglang) start: {cause}") from error

    def _keep(self, started: Future[None]) -> None:
        """Body of the keeper thread: start the process, and end the whole server as soon as one part is gone."""
        assert self._scratch is not None
        environment = {**variables(), **self._environment, "TMPDIR": str(self._scratch.path)}
        request = {"parent_pid": os.getpid(), "server_args": self._server_args}
        try:
            # Readable by this user only, because the log may quote arguments of requests.
            descriptor = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "wb") as log:
                os.fchmod(descriptor, 0o600)
                self._log_start = os.fstat(descriptor).st_size
                self._process = subprocess.Popen(  # noqa: S603 (our own module, no arguments)
                    python_module("rollout.sglang.launch"),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            started.set_exception(error)
            return
        started.set_result(None)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode())
            self._process.stdin.close()
        except BrokenPipeError:
            logger.warning("engine %d ended before it had read its arguments", self._index)
        self._watch(self._process)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        while True:
            code = process.poll()
            if code is not None:
                self._end_cause = f"The server ended with {_exit_text(code)}"
                break
            gone = [part for part in self._parts if not _is_alive(part)]
            if gone:
                self._end_cause = f"A part of the server ended: process {gone[0].pid}"
                break
            time.sleep(WATCH_INTERVAL_S)
        self._end_noticed.set()
        self._survivors = self._kill_all()
        # No process runs any more, or SIGKILL does not end one: in neither case there is anything to wait for.
        process.poll()
        self._ended.set()

    def _wait_ready(self, deadline: float, timeout_s: float) -> None:
        client = self.client()
        cause = "no answer"
        while True:
            remaining_s = deadline - time.monotonic()
            if self._end_noticed.is_set():
                raise EngineError(self.error("start", "the server ended before it was ready", policy_version=0))
            if remaining_s <= 0:
                cause = f"the server was not ready within rollout.start_timeout_s={timeout_s}; its last answer: {cause}"
                raise EngineError(self.error("start", cause, policy_version=0))
            try:
                client.call("/model_info", timeout_s=remaining_s)
                return
            except ClientError as error:
                cause = str(error)
            time.sleep(READY_INTERVAL_S)

    def _session(self) -> list[psutil.Process]:
        """Every live process of the server, orphans included: all share the session of the first process."""
        members = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self._leader and _is_alive(process):
                    members.append(process)
            except ProcessLookupError:
                continue
        return members

    @property
    def _leader(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _kill_all(self) -> set[int]:
        """Kill the whole session; returns the ids of processes that are still alive at the deadline."""
        assert self._process is not None and self._scratch is not None
        deadline = time.monotonic() + STOP_TIMEOUT_S
        members = self._session()
        self._scratch.note_segments(members)
        trackers = [member for member in members if _is_tracker(member)]
        while others := [member for member in self._session() if member not in trackers]:
            for member in others:
                _kill(member)
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        tracker_deadline = time.monotonic() + TRACKER_TIMEOUT_S
        while any(map(_is_alive, trackers)) and time.monotonic() < tracker_deadline:
            time.sleep(0.02)
        for tracker in trackers:
            _kill(tracker)
        while (alive := {member.pid for member in self._session()}) and time.monotonic() < deadline:
            time.sleep(0.02)
        return alive

    def _log_tail(self) -> str:
        try:
            with self._log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, log.tell() - LOG_TAIL_BYTES))
                text = log.read().decode("utf-8", errors="replace")
        except OSError as error:
            return f"(the log cannot be read: {error})"
        for key in (self._api_key, self._admin_api_key):
            text = text.replace(key, "<redacted>")
        lines = [line for line in text.splitlines() if not LOG_NOISE.search(line)]
        return "\n".join(lines[-LOG_TAIL_LINES:])


def hold_port() -> socket.socket:
    """A socket that holds a free loopback port for a server, which starts to listen many seconds later.

    It does not listen itself. With SO_REUSEADDR on both sides the kernel lets the server bind the port too; a socket
    without this option, as of another server that looks for a free port, is refused. Raises EngineError if a hundred
    random ports are all taken.
    """
    for port in (secrets.choice(PORTS) for _ in range(100)):
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # Without the option the kernel refuses a port that anybody else holds.
            held.bind((HOST, port))
        except OSError:
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return held
    raise EngineError(f"no free port among 100 of {PORTS.start}..{PORTS.stop - 1} on {HOST}")


def _exit_text(code: int) -> str:
    signals = {-number.value: f" ({number.name})" for number in signal.Signals}
    return f"exit code {code}{signals.get(code, '')}"


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
