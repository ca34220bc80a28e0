"""The process that talks to W&B: JSON lines in, JSON lines out. Started by wandb_sink.py.

wandb hooks the exit of its process, waits there for the network and starts services of its own. In a process of its
own none of that can delay or end a run, and the run's crash is seen here (end of input) and told to W&B.

Input: one job (see `_start_run`), then messages (see `_Panels.take`), then `{"exit_code": int}`.
Output: `{"event": "ready" | "off" | "error" | "finished", ...}`.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

SUMMARIES = (
    ("reward/mean", "max,last"),
    ("eval/", "max,last"),
    ("mismatch/k3", "max,last"),
    ("mismatch/ess/", "min,last"),
    ("guard/level", "max,last"),
    ("time/", "mean,last"),
    ("perf/", "mean,last"),
)
"""(metric or group, what the summary of the run keeps of it); of all others it keeps the last value."""
SHARE_OF_TABLE = 0.1
"""An increment of the table is sent when it holds this share of what was sent: W&B shows the last hundred."""


def main() -> None:
    """Serve one run, then leave without the exit hooks of wandb."""
    replies = _take_stdout()
    job = json.loads(sys.stdin.readline())
    run = _start_run(job, replies)
    if run is not None:
        _serve(run, replies)
        _end_service()
    # wandb's exit hooks would try for up to 30 s to send telemetry to a server that does not answer.
    os._exit(0)


def _take_stdout() -> TextIO:
    """The real stdout for replies; whatever a library prints goes to stderr from now on."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _reply(replies: TextIO, event: str, **content: object) -> None:
    replies.write(json.dumps({"event": event, **content}) + "\n")
    replies.flush()


def _start_run(job: dict[str, Any], replies: TextIO) -> Any:
    """The first of `job["modes"]` that works, or None; says which."""
    try:
        import wandb
    except Exception as error:  # broken installations raise more than ImportError
        _reply(replies, "off", reason=f"the package wandb cannot be imported: {_one_line(error)}")
        return None
    reasons = []
    for mode in job["modes"]:
        try:
            run = _init(wandb, job, mode)
        except Exception as error:
            reasons.append(f"{mode}: {_one_line(error)}")
            # The failed attempt leaves a service process that would take part in the next one.
            wandb.teardown()
            continue
        _reply(replies, "ready", mode=mode, url=run.url, sync=_sync_command(run), reasons=reasons)
        return run
    _reply(replies, "off", reason="; ".join(reasons))
    return None


def _init(wandb: Any, job: dict[str, Any], mode: str) -> Any:
    settings = wandb.Settings(
        init_timeout=job["init_timeout_s"],
        finish_timeout=job["finish_timeout_s"],
        finish_timeout_raises=True,
        silent=True,
        console="off",
        # wandb would record host and user, the git remote (it may hold a login) and a diff of the sources.
        # What a reader needs is in the config, without secrets.
        x_disable_meta=True,
        x_save_requirements=False,
        disable_git=True,
        disable_code=True,
        x_stats_pid=job["pid"],
    )
    run = wandb.init(
        project=job["project"],
        entity=job["entity"],
        name=job["name"],
        id=job["id"],
        resume="allow",
        dir=job["dir"],
        mode=mode,
        config=job["config"],
        settings=settings,
    )
    # Rows are placed by our step: W&B silently drops rows whose own counter would go back.
    run.define_metric("global_step", hidden=True)
    run.define_metric("*", step_metric="global_step")
    return run


class _Panels:
    """What one run shows: numbers, histograms, the table of samples, alerts."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._table: Any = None
        self._sent = self._waiting = self._step = 0
        self._known: set[str] = set()

    def take(self, message: dict[str, Any]) -> None:
        """Carry out one message: numbers, histograms or rows of samples with their step, or an alert."""
        import wandb

        if "numbers" in message:
            self._define(message["numbers"])
            self._run.log({"global_step": message["step"], **message["numbers"]})
        elif "histograms" in message:
            made = {
                name: wandb.Histogram(np_histogram=(mass, edges))
                for name, (mass, edges) in message["histograms"].items()
            }
            self._run.log({"global_step": message["step"], **made})
        elif "samples" in message:
            self._add_samples(message["samples"], step=message["step"])
        elif "alert" in message:
            # W&B takes 0 for its own pause of a minute between alerts with one title.
            self._run.alert(**message["alert"], wait_duration=1)

    def _define(self, names: Iterable[str]) -> None:
        """Name by name: where two patterns fit a metric, W&B takes one of them by chance."""
        for name in [name for name in names if name not in self._known]:
            self._known.add(name)
            for key, summary in SUMMARIES:
                if name == key or (key.endswith("/") and name.startswith(key)):
                    self._run.define_metric(name, step_metric="global_step", summary=summary)

    def _add_samples(self, rows: list[dict[str, Any]], *, step: int) -> None:
        import wandb

        for row in rows:
            if self._table is None:
                self._table = wandb.Table(columns=list(row), log_mode="INCREMENTAL")
            self._table.add_data(*row.values())
        self._waiting, self._step = self._waiting + len(rows), step
        if self._waiting > SHARE_OF_TABLE * self._sent:
            self.send_samples()

    def send_samples(self) -> None:
        """Send what the table has gained: an increment, not the table again."""
        if self._waiting:
            self._run.log({"global_step": self._step, "samples": self._table})
            self._sent, self._waiting = self._sent + self._waiting, 0


def _serve(run: Any, replies: TextIO) -> None:
    exit_code = 1  # the input ends without an exit code if the run crashed
    panels = _Panels(run)
    for line in sys.stdin:
        message = json.loads(line)
        if "exit_code" in message:
            exit_code = message["exit_code"]
            break
        try:
            panels.take(message)
        except Exception as error:
            _reply(replies, "error", reason=_one_line(error))
    try:
        panels.send_samples()
        run.finish(exit_code=exit_code)
    except Exception as error:
        _reply(replies, "error", reason=_one_line(error))
        return
    _reply(replies, "finished")


def _end_service() -> None:
    """End the service process in order; `os._exit` would leave it to notice by itself."""
    import wandb

    wandb.teardown()


def _sync_command(run: Any) -> str:
    """The command that uploads what this run left on disk."""
    return f"wandb sync {shlex.quote(str(Path(run.dir).resolve().parent))}"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


if __name__ == "__main__":
    main()
