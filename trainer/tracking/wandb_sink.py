"""Rows of numbers -> W&B through wandb's own client, without ever ending or delaying a run. Used only by tracker.py.

One daemon thread makes every call into wandb. The run puts calls into a bounded queue and never waits; only `finish`
waits, with a deadline, and then kills wandb-core, the process that the client writes and uploads with. metrics.jsonl is
the source of truth: a call that fails is a count and one warning.

wandb-core has a session of its own, so that no signal to the run reaches it, and ends by itself when the run is gone.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from trainer.config.outputs import TrackingConfig, WandbMode
from trainer.rundir.run_dir import make_private
from trainer.text.plain import command_line
from trainer.tracking.wandb_panels import Panels
from trainer.tracking.wandb_run import keep_run, new_run_id, wandb_key_source, wandb_run

logger = logging.getLogger(__name__)
P = ParamSpec("P")

_START_TIMEOUT_S = 20.0
"""Deadline for reaching W&B; after the deadline the run continues offline."""
_FINISH_TIMEOUT_S = 20.0
"""Deadline for writing and uploading what is left when the run ends; orchestrators kill 30 s after SIGTERM."""
_KILL_TIMEOUT_S = 2.0
"""Seconds that wandb-core has to end after SIGTERM, and that the thread has to end once wandb-core is gone."""
_FLUSH_S = 1.0
"""A run that is killed loses at most the rows of this many seconds in W&B."""
_MAX_WAITING = 1000
"""Calls that wait for the thread: some hundred steps."""
_DELETED = "was previously created and deleted"
"""Part of the server's answer to an id whose run was deleted: W&B never takes such an id again."""


class WandbSink:
    """The W&B side of one run. `start`, then `put` for every call, then `finish`.

    Args:
        config: mode, project, name and what else the keys of tracking say.
        run_dir: W&B writes to `run_dir/wandb`, or to the directory in WANDB_DIR.
        name: name of the run in the W&B project, unless key, variable or an earlier start give it another.
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
        self._root = Path(os.path.expanduser(os.environ.get("WANDB_DIR") or run_dir))
        self._run = wandb_run(config, run_dir, name=name)
        self._record = record
        self._report = report
        self._calls: queue.Queue[Callable[[Panels], None] | None] = queue.Queue(maxsize=_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._core: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._finished = False
        self._exit_code = 1
        self._warned = False
        self._sync_command = ""
        self.mode = WandbMode.disabled
        """Mode of W&B in this run, once W&B has started: online, offline or disabled."""
        self.errors = 0
        """Calls that failed and rows that were dropped."""

    def start(self) -> None:
        """Start W&B in the background; the user is told in one line what came of it. WANDB_MODE decides for `auto`.

        Raises OSError if the id and the name of the run cannot be kept.
        """
        wanted = self._config.wandb
        if wanted is WandbMode.auto and os.environ.get("WANDB_MODE") in ("online", "offline", "disabled"):
            wanted = WandbMode[os.environ["WANDB_MODE"]]
        if wanted is WandbMode.disabled:
            return
        modes, reasons = [WandbMode.offline], []
        if wanted is not WandbMode.offline and wandb_key_source():  # else wandb asks for a key
            modes.insert(0, WandbMode.online)
        elif wanted is WandbMode.online:
            reasons.append("online: no key was found")
        keep_run(self._run_dir, self._run)  # now: the first checkpoint holds the id
        self._thread = threading.Thread(target=self._work, args=(modes, reasons), name="wandb-calls", daemon=True)
        self._thread.start()

    def put(self, action: Callable[Concatenate[Panels, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Queue `action`, a method of Panels, with its arguments, which must not change; returns at once."""
        if self._thread is None or not self._thread.is_alive():
            return
        try:
            self._calls.put_nowait(lambda panels: action(panels, *args, **kwargs))
        except queue.Full:
            self._failed(f"more than {_MAX_WAITING} calls are waiting; rows are dropped")

    def finish(self, *, exit_code: int) -> None:
        """Write everything out and end the W&B run; after a deadline, kill wandb-core and say how to upload."""
        thread, self._exit_code = self._thread, exit_code
        if thread is None:
            return
        to_start = _START_TIMEOUT_S if self.mode is WandbMode.disabled else 0.0
        try:
            with suppress(queue.Full):  # then wandb has not answered for hundreds of steps
                self._calls.put_nowait(None)
                thread.join(_FINISH_TIMEOUT_S + to_start)
        finally:  # also when a second signal ends the wait
            in_time = not thread.is_alive()
            self._thread, self._closing = None, True
            if self._core is not None:
                _end(self._core)
            with suppress(queue.Full):  # the thread looks at `_closing` after the call that it is in
                self._calls.put_nowait(None)
        thread.join(_KILL_TIMEOUT_S)
        if self.mode is WandbMode.disabled:
            if not in_time:
                self._failed("did not start in time")
        elif not self._finished:
            self.errors += 1
            reason = "ended early" if in_time else "did not finish in time"
            self._report(f"W&B: {reason}; upload what is on disk with: {self._sync_command}")
        elif self.mode is WandbMode.offline:
            self._report(f"W&B: upload this run with: {self._sync_command}")

    def _work(self, modes: list[WandbMode], reasons: list[str]) -> None:
        """The thread that calls wandb."""
        # These settings are read from the environment only; a variable that the user has set stays.
        wanted = {
            # Tables become files of artifacts, which W&B would keep in the home directory until they are uploaded.
            "WANDB_DATA_DIR": str(self._root / "wandb"),
            # Telemetry of the client waits for the network when the process exits.
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_SILENT": "true",
        }
        added = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(added)
        try:
            run = self._begin(modes, reasons)
            if run is not None:
                self._serve(run)
        except Exception as error:
            if not self._closing:
                self._failed(_one_line(error))
        finally:
            _teardown()
            for name in added:
                os.environ.pop(name, None)

    def _serve(self, run: Any) -> None:
        """Make the calls of the queue until the run ends."""
        panels = Panels(run)
        while (call := self._calls.get()) is not None and not self._closing:
            try:
                call(panels)
            except Exception as error:
                self._failed(_one_line(error))
        if not self._closing:
            panels.send_samples()
            run.finish(exit_code=self._exit_code)
            self._finished = _teardown()  # only then is everything on the disk

    def _begin(self, modes: list[WandbMode], reasons: list[str]) -> Any:
        """The run in the first of `modes` that works, or None."""
        is_renewed = False
        while modes:
            mode = modes.pop(0)
            try:
                run = self._init(mode)
            except Exception as error:
                self.errors += 1
                reasons.append(f"{mode.name}: {_one_line(error)}")
                _teardown()  # the next attempt would take up what the failed one has left in the client
                if self._closing:
                    return None
                if _DELETED in str(error) and not is_renewed:
                    self._run = replace(self._run, id=new_run_id())
                    keep_run(self._run_dir, self._run)
                    is_renewed = True
                    modes.insert(0, mode)
                    self._report("W&B: this run was deleted there; it goes on there as a new run, from this step on")
                continue
            own = Path(run.dir).resolve().parent
            # An earlier start that was offline left a directory of its own, with the steps before this start.
            earlier = set(own.parent.glob(f"offline-run-*-{self._run.id}")) - {own}
            self._sync_command = f"wandb sync {command_line(*sorted(earlier), own)}"
            self.mode = mode
            why = f" ({'; '.join(reasons)})" if reasons else ""
            # The end of the run has the command; of a run that is killed, the directory is enough for it.
            where = f" at {run.url}" if mode is WandbMode.online else f", in {command_line(own)}"
            self._report(f"W&B: {mode.name}{why}{where}")
            return run
        self._report(f"W&B: off ({'; '.join(reasons)})")
        return None

    def _init(self, mode: WandbMode) -> Any:
        """Start wandb-core and the run; raises what the client raises."""
        import wandb

        settings = wandb.Settings(
            init_timeout=_START_TIMEOUT_S,
            finish_timeout=0.75 * _FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
            silent=True,
            console="off",
            # wandb would record host and user, the git remote (it may hold a login) and a diff of the sources.
            # What a reader needs is in the config, without secrets.
            x_disable_meta=True,
            host="",
            x_save_requirements=False,
            disable_git=True,
            disable_code=True,
            x_transaction_log_flush_interval=_FLUSH_S,
            # The default answer to "stop run" on the web page is a Ctrl-C.
            stop_fn=lambda: self._report("W&B: asks this run to stop, which only a signal can do"),
        )
        os.environ.pop("WANDB_SERVICE", None)  # wandb-core of a parent that uses wandb: it is not ours to end
        hooks = sys.exit, sys.excepthook
        service = wandb.setup(settings).ensure_service()
        # The hooks of the client would judge how the run ends, and wait for the network when the process exits.
        sys.exit, sys.excepthook = hooks
        assert service._cleanup is not None and service._proc is not None
        service._cleanup()
        self._core = service._proc._process
        if self._closing:
            raise TimeoutError("the run has ended before wandb-core was there")
        make_private(self._root)  # for a directory that is not there the client takes the temporary directory
        return wandb.init(
            **asdict(self._run),
            resume="allow",
            dir=str(self._root),
            mode=mode.name,  # type: ignore[arg-type]
            config=dict(self._record),
            settings=settings,
        )

    def _failed(self, reason: str) -> None:
        self.errors += 1
        if not self._warned:
            self._warned = True
            logger.warning("W&B: %s. The run goes on; metrics.jsonl has everything.", reason)


def _teardown() -> bool:
    """End the client and wandb-core, if they are there; False if they did not end in order."""
    wandb = sys.modules.get("wandb")
    try:
        if wandb is not None:
            wandb.teardown()
    except (Exception, SystemExit) as error:  # it exits the thread if wandb-core was killed
        logger.info("W&B: the client did not end in order: %s", _one_line(error))
        return False
    return True


def _end(core: subprocess.Popen[bytes]) -> None:
    """End wandb-core and what it started; the data of a run that was finished is written by then."""
    core.terminate()
    try:
        core.wait(_KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(core.pid, signal.SIGKILL)  # it leads a session of its own
        core.wait(_FINISH_TIMEOUT_S)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
