"""`parity train <recipe> resume=auto`: the run to go on with, when run.dir is not named. Used by `commands.py`."""

from __future__ import annotations

from pathlib import Path

from trainer.cli.compose import Resolution
from trainer.components import Resume
from trainer.tracking.run_dir import has_checkpoint, is_run


def earlier_run(resolution: Resolution) -> Path | None:
    """The newest run of the recipe, if the command asks to resume without naming run.dir; None for a new one.

    run.dir as it is by default is named after the time, so the earlier runs are beside it. Runs that ended before their
    first step are passed over if there is another: a mistake in a command must not hide the run that it was about.
    """
    if resolution.multirun or len(resolution.runs) != 1:
        return None
    [run] = resolution.runs
    if run.config is None or run.config.run.resume is not Resume.auto or not run.named_after_time:
        return None
    beside = Path(run.config.run.dir).absolute().parent
    runs = [path for path in beside.iterdir() if path.is_dir() and is_run(path)] if beside.is_dir() else []
    begun = [path for path in runs if _has_begun(path)]
    return max(begun or runs, key=lambda path: path.name, default=None)


def _has_begun(run_dir: Path) -> bool:
    """Whether a run made a step."""
    metrics = run_dir / "metrics.jsonl"
    return has_checkpoint(run_dir) or (metrics.is_file() and metrics.stat().st_size > 0)
