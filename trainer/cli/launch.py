"""A checked command -> hydra.main -> trainer.run.loop.train, once or once per combination of a sweep.

Hydra shows configs (--cfg), expands sweeps and names the directories; the job function here turns its config into a
TrainConfig for the last time and reports how the run ended. Called by `commands.py`.
"""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from trainer.cli.arguments import TrainArguments
from trainer.compose.compose import build_config
from trainer.compose.outcome import DONE, FAILED, report
from trainer.compose.overrides import recipe_override
from trainer.compose.session import VERSION_BASE, register
from trainer.rundir.redact import redact_text
from trainer.rundir.run_dir import RunDirectoryError
from trainer.rundir.termination import RunTerminated

OWN_PACKAGES = frozenset({"algorithms", "rollout", "trainer"})
ERROR_LOG = "error.log"


def launch(recipe: Path, arguments: TrainArguments) -> int:
    """Let Hydra do what the command asks; returns the worst exit code of its runs, 0 if it only showed something."""
    outcomes: list[int] = []

    def job(composed: DictConfig) -> None:
        outcomes.append(run_job(composed))

    words = [*arguments.hydra_flags, *arguments.overrides, recipe_override(recipe.stem)]
    hydra_main(recipe, words, own_dir=arguments.own_dir, job=job)
    failed = sum(outcome != DONE for outcome in outcomes)
    if len(outcomes) > 1 and failed:
        sys.stderr.write(f"parity train: {failed} of {len(outcomes)} runs failed\n")
    return max(outcomes, default=DONE)


def hydra_main(recipe: Path, words: Sequence[str], *, own_dir: Path | None, job: Callable[[DictConfig], None]) -> None:
    """Call hydra.main for the recipe in the file `recipe`, as if `words` were the command line."""
    register(own_dir)
    decorated = hydra.main(version_base=VERSION_BASE, config_path=str(recipe.parent), config_name=recipe.stem)(job)
    command_line = sys.argv
    sys.argv = [command_line[0], *words]
    try:
        decorated()
    finally:
        sys.argv = command_line


def run_job(composed: DictConfig) -> int:
    """Run one job inside Hydra; returns its exit code and never raises but for Ctrl-C."""
    settings = HydraConfig.get()
    run_dir = Path(settings.runtime.output_dir)
    # Hydra decides the directory: run.dir, a directory per job of a sweep, or what hydra.run.dir says.
    composed.run.dir = str(run_dir)
    config, problems = build_config(composed)
    if config is None:
        return report(problems, command="parity train")
    if settings.mode is RunMode.MULTIRUN:
        changed = [word for word in settings.overrides.task if not word.startswith("run.recipe=")]
        sys.stdout.write(f"run {settings.job.num}: {' '.join(changed)} -> {run_dir}\n")
        sys.stdout.flush()
    try:
        # Here and not above: this line imports torch, Ray and transformers.
        from trainer.run.loop import train

        result = train(config)
    except KeyboardInterrupt:
        sys.stderr.write(f"parity train: interrupted; what was written stays in {run_dir}\n")
        raise
    except RunTerminated as ended:
        saved = f"go on with {resume_command(run_dir)}" if config.checkpoint.every else "nothing was saved"
        sys.stderr.write(f"parity train: {ended}; {saved}\n")
        return ended.exit_code
    except Exception as error:
        return failed(error, run_dir, command="parity train")
    if result.was_complete:
        more = f"{resume_command(run_dir)} run.num_steps=<more> goes on with it"
        sys.stdout.write(f"{run_dir} has taken all {config.run.num_steps} steps: nothing was started; {more}\n")
    sys.stdout.write(f"{result.report_path}\n")
    return DONE


def resume_command(run_dir: Path) -> str:
    """The command line that goes on with a run."""
    return f"parity resume {shlex.quote(str(run_dir))}"


def failed(error: Exception, run_dir: Path, *, command: str) -> int:
    """Say in one paragraph what happened and keep the traceback in the run directory, unless that is another run's."""
    trace = redact_text("".join(traceback.format_exception(error)))
    if any(kind.__module__.partition(".")[0] in OWN_PACKAGES for kind in type(error).__mro__):
        message = str(error)
    else:
        # Not one of our own errors, so its message alone may say too little: add where it came from.
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    if isinstance(error, RunDirectoryError):
        sys.stderr.write(f"{command} failed: {redact_text(message)}\n")
        return FAILED
    log = run_dir / ERROR_LOG
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        log.write_text(trace, encoding="utf-8")
        kept = f"The full traceback is in {log}."
    except OSError as unwritable:
        kept = f"The traceback cannot be written to {log} ({unwritable}):\n{trace}"
    sys.stderr.write(f"{command} failed: {redact_text(message)}\n{kept}\n")
    return FAILED
