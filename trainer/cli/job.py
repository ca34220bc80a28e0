"""Checked runs -> their jobs, one after the other -> exit code, with a sentence about the end of each run.

Every run uses the config that was checked before the first run started. Called by `train.py`.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rollout.data.data_files import on_hub
from rollout.data.dataset import first_row
from rollout.rewards.references import form_notes
from rollout.task_config import FileDataConfig
from trainer.cli.report import COMPARISON
from trainer.cli.sweep import COMMAND, Ended, begun_directories, compare
from trainer.compose.compose import Resolution
from trainer.config.train import TrainConfig
from trainer.ending.exit_codes import DONE, FAILED, GO_ON, REFUSED, report
from trainer.ending.termination import RunTerminated, termination_requests
from trainer.ending.time_limit import job_variable
from trainer.rundir.resume import checkpoint_to_resume, takes_no_step
from trainer.rundir.run_dir import StartError, how_to_go_on, make_private, newest_saved_step
from trainer.start.task_check import data_judgement, on_disk, task_key
from trainer.text.plain import command_line, printable, to_stderr, to_stdout_while_read
from trainer.text.redact import redact_argv, redact_text

OWN_PACKAGES = frozenset({"algorithms", "rollout", "trainer"})
ERROR_LOG = "error.log"


def launch(resolution: Resolution, *, command: str) -> int:
    """Run all jobs of a resolution without problems, up to a request to end; return the highest exit code.

    `command` is what was typed, without the words that change the configuration.
    """
    ended: list[Ended] = []
    try:
        # A run hears signals itself. Before it, the imports take seconds, and the first process of a container would
        # never end of a SIGTERM that has no handler.
        with termination_requests():
            _run_jobs(resolution, ended, command=command)
    except RunTerminated as request:
        to_stderr(f"parity train: {request}\n")
        ended.append(Ended(exit_code=request.exit_code, seconds=0.0))
    codes = [run.exit_code for run in ended]
    if len(resolution.runs) > 1:
        codes.append(_conclude(resolution, ended, command=command))
    return max(codes)


def _conclude(resolution: Resolution, ended: Sequence[Ended], *, command: str) -> int:
    """Say how the runs of a sweep ended -> exit code: only a request to end changes it, no unwritten table or page."""
    code = DONE
    try:
        with termination_requests():
            compare(resolution, ended)
    except RunTerminated as request:
        code = request.exit_code
        _not_compared(resolution, f"asked to end ({signal.Signals(code - 128).name})")
    except Exception as error:  # of a full disk for example
        _not_compared(resolution, f"{type(error).__name__}: {redact_text(str(error))}")
    if not_begun := resolution.runs[len(ended) :]:
        words = (f"  {command} {command_line(*redact_argv(run.overrides))}\n" for run in not_begun)
        count = f"{len(not_begun)} of {len(resolution.runs)} runs were not begun"
        to_stderr(f"parity train: {count}; one by one:\n{''.join(words)}")
    if num_failed := sum(run.exit_code in (FAILED, REFUSED) for run in ended):
        to_stderr(f"parity train: {num_failed} of {len(ended)} runs failed\n")
    return code


def _not_compared(resolution: Resolution, reason: str) -> None:
    """Say why the sweep has no page, and the command that writes it."""
    directories = begun_directories(resolution)
    page = resolution.run_dir(0).parent / COMPARISON
    command = command_line("parity", "report", *directories, "-o", page)
    way_out = f"; {command} writes it" if directories else ""
    to_stderr(f"parity train: {page} was not written: {reason}{way_out}\n")


def _run_jobs(resolution: Resolution, ended: list[Ended], *, command: str) -> None:
    """Run the jobs one after the other; `ended` gets how each of them ended."""
    if len(resolution.runs) > 1:
        with suppress(OSError):  # the first run says what is wrong
            make_private(resolution.run_dir(0).parent)
    for index, run in enumerate(resolution.runs):
        assert run.config is not None
        run_dir = resolution.run_dir(index)
        run.config.run.dir = str(run_dir)
        if len(resolution.runs) > 1:
            _answer(f"run {index}: {' '.join(redact_argv(run.overrides))} -> {run_dir}\n")
        began = time.monotonic()
        code = run_job(run.config, run_dir, command=command)
        ended.append(Ended(exit_code=code, seconds=time.monotonic() - began))
        # A signal asks to end the command, not only one of its runs; and no run begins at the end of the job.
        if code > 128 or (code == GO_ON and job_variable()):
            return


def run_job(config: TrainConfig, run_dir: Path, *, command: str = COMMAND) -> int:
    """Run one job; return its exit code. Raises KeyboardInterrupt at a request before the run hears it.

    A run that is refused is refused in the name of `command`.
    """
    try:
        # Imported late, because this line imports torch, Ray and transformers.
        from trainer.run.loop import train

        result = train(config)
    except RunTerminated as ended:
        saved = newest_saved_step(run_dir)
        kept = "" if saved in (None, ended.step) else f" (step {saved} is saved)"
        # The command is last, so that a whole word can be copied.
        then = "nothing was saved" if saved is None else f"go on with {resume_command(run_dir)}"
        to_stderr(f"parity train: {ended}{kept}; {then}\n")
        return ended.exit_code
    except Exception as error:
        return failed(error, run_dir, command=command if isinstance(error, StartError) else COMMAND)
    if result.was_complete:
        more = how_to_go_on(resume_command(run_dir), saved=newest_saved_step(run_dir))
        _answer(f"{run_dir} has taken all {config.run.num_steps} steps: nothing was started; {more}\n")
    _answer(f"{result.report_path or run_dir}\n")
    return DONE


def _answer(text: str) -> None:
    """Write an answer; the runs that are left do not depend on its reader."""
    to_stdout_while_read(text, command=COMMAND)


def load_tasks(resolution: Resolution) -> tuple[list[str], list[str]]:
    """Load tokenizer and data as the runs do, where they are on this disk -> (problems, lines about what was read)."""
    configs = [run.config for run in resolution.runs if run.config is not None]
    found: dict[str, None] = {}
    notes: list[str] = []
    for config in {task_key(config): config for config in configs}.values():
        if local := on_disk(config):
            # Imported late, because this line imports transformers.
            from trainer.run.task import checked_task

            try:
                checkpoint = checkpoint_to_resume(config, run_dir := Path(config.run.dir))
                if takes_no_step(config, run_dir, checkpoint):
                    continue
                resumed = None if checkpoint is None else checkpoint.state
                task, _ = checked_task(local, resumed, progress=lambda done, total, detail: None)
                notes += task.dataset.notes
            except StartError as error:
                found |= dict.fromkeys(redact_text(str(problem)) for problem in error.problems)
        elif isinstance(config.data, FileDataConfig):
            notes += [f"{source} is on the hub: not read now" for source in on_hub(config.data, config.sources)] or [
                "the model is not on this disk: prompts are not in its template, and their lengths not known"
            ]
            if first := first_row(config.data, {}, data_judgement(config)):
                notes += form_notes(config.reward, [first[0].text])
    return list(found), notes


def resume_command(run_dir: Path) -> str:
    """The command line that continues a run."""
    return command_line("parity", "resume", run_dir)


def failed(error: Exception, run_dir: Path, *, command: str) -> int:
    """Report an error in one paragraph -> the exit code: REFUSED where nothing was started, and nothing is written.

    The traceback of another error is kept in the run directory.
    """
    if isinstance(error, StartError):
        return report([redact_text(str(problem)) for problem in error.problems], command=command)
    trace = printable(redact_text("".join(traceback.format_exception(error))))
    if any(kind.__module__.partition(".")[0] in OWN_PACKAGES for kind in type(error).__mro__):
        message = str(error)
    else:
        # The message of a foreign error may say too little: add the place that raised the error.
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    log = run_dir / ERROR_LOG
    try:
        make_private(run_dir)
        log.write_text(trace, encoding="utf-8")
        kept = f"The full traceback is in {log}."
    except OSError as unwritable:
        kept = f"The traceback cannot be written to {log} ({unwritable}):\n{trace}"
    notes = "".join(f"{redact_text(note)}\n" for note in getattr(error, "__notes__", ()))
    to_stderr(f"{command} failed: {redact_text(message)}\n{kept}\n{notes}")
    return FAILED
