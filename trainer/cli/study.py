"""`parity study <recipe> [study.key=value ...] [key=value ...]`: words -> checked grid -> runs -> one page.

Every problem of every run is reported before a run is started. Called by `commands.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from algorithms.config import NOT_SET, Problem
from algorithms.objective import objective, reference_term
from trainer.cli.arguments import parse_recipe
from trainer.cli.plan import render_plan
from trainer.cli.tables import labelled, rows_text
from trainer.compose.catalog import find_recipe, recipe_name
from trainer.compose.overrides import path_override
from trainer.compose.read import read_own_keys
from trainer.ending.exit_codes import DONE, FAILED, GO_ON, refuse, report
from trainer.ending.termination import RunTerminated
from trainer.limits.machine import this_machine
from trainer.rundir.run_dir import RunDirectoryError, lock_directory, logged_step, release_directory, unusable_problem
from trainer.start.checks import shared_id_problems
from trainer.study.config import PRECISIONS, StudyConfig, precision_words
from trainer.study.grid import Study, compose_study
from trainer.study.page import PAGE_FILE, write_study
from trainer.study.ranking import MODE_COLUMN, TITLES, rank, study_notes, table_rows
from trainer.study.results import (
    CellRecord,
    Stage,
    newest_study,
    read_records,
    read_results,
    stage_of,
    studies_dir,
    study_problems,
)
from trainer.study.run import parallel_problems, run_cells, say
from trainer.text.plain import command_line, counted, duration, to_stdout
from trainer.text.redact import redact_argv

NAME = "parity study"
SECTION = "study"
MODES = f"{SECTION}.modes"
RESUME_WORDS = ("resume=auto", "run.resume=auto")


def run_study(words: Sequence[str]) -> int:
    """Run or continue the study of `parity study <words>`; return the exit code."""
    own = [word for word in words if word.startswith(f"{SECTION}.")]
    rest = [word for word in words if word not in own and word not in RESUME_WORDS]
    arguments, problems = parse_recipe(rest, command="study")
    if not arguments.recipe:
        return refuse(NAME, "recipe", "is missing", NOT_SET, f"{NAME} <recipe>; see {NAME} --help.")
    config, wrong = read_own_keys(StudyConfig, own, section=SECTION)
    problems += wrong
    recipe = find_recipe(arguments.recipe, own_dir=arguments.own_dir)
    if isinstance(recipe, Problem):
        return report([recipe, *problems], command=NAME)
    if wrong:  # one precision and one seed show what is wrong with the recipe, an override or a mode
        modes, _ = read_own_keys(StudyConfig, [word for word in own if word.startswith(MODES)], section=SECTION)
        one = replace(modes, precisions=[PRECISIONS[0]], seeds=[0])
        problems += compose_study(recipe, arguments.overrides, one, own_dir=arguments.own_dir)[1]
        return report(problems, command=f"{NAME} {arguments.recipe}")
    study, of_runs = compose_study(recipe, arguments.overrides, config, own_dir=arguments.own_dir)
    study_dir = _directory(config, recipe_name(recipe), resumes=any(word in RESUME_WORDS for word in words))
    unusable = unusable_problem("study.dir", study_dir)
    problems += [*of_runs, *([unusable] if unusable else study_problems(study_dir, study.cells))]
    problems += [*parallel_problems(study, this_machine()), *shared_id_problems(len(study.cells))]
    if problems:
        return report(problems, command=f"{NAME} {arguments.recipe}")
    if arguments.dry_run:
        to_stdout(render_grid(study, study_dir))
        return DONE
    # The recorded command omits study.dir and resume, so that it stays the same when a study is continued or moved.
    kept = [word for word in words if word not in RESUME_WORDS and not word.startswith(f"{SECTION}.dir=")]
    try:
        lock = lock_directory(study_dir, key="study.dir")
    except RunDirectoryError as error:
        return report(error.problems, command=NAME)
    try:
        return _run(study, study_dir, command=command_line(*NAME.split(), *redact_argv(kept)))
    except RunTerminated as ended:  # by a second signal
        say(f"{NAME}: ended at once; go on with {command_line(path_override('study.dir', study_dir))}")
        return ended.exit_code
    finally:
        release_directory(lock, study_dir)


def _directory(config: StudyConfig, recipe_name: str, *, resumes: bool) -> Path:
    """Directory of the study: study.dir, else with `resumes` the newest study of the recipe, else a new directory."""
    if config.dir is not None:
        return Path(config.dir)
    newest = newest_study(recipe_name) if resumes else None
    return newest or studies_dir(recipe_name) / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"


def _run(study: Study, study_dir: Path, *, command: str) -> int:
    """Run all unfinished runs, and write the page after every run."""
    records = read_records(study_dir)
    say(summary(study, study_dir, records))
    write = partial(write_study, study, study_dir, records, command=command)
    write()
    code = run_cells(study, study_dir, records, ended=write)
    not_written = write()
    results = read_results(study, study_dir, records)
    ranking = rank(results)
    notes = study_notes(study.config, results, ranking)
    page = study_dir / PAGE_FILE
    table = rows_text([TITLES, *table_rows(ranking)], num_words=MODE_COLUMN + 1)
    to_stdout("\n".join([table, *notes, str(page), ""]))
    if not_written:
        say(f"{NAME}: {page} could not be written ({not_written})")
    if code != DONE:
        reason = "out of time" if code == GO_ON else f"asked to end ({signal.Signals(code - 128).name})"
        say(f"{NAME}: {reason}; go on with {command_line(path_override('study.dir', study_dir))}")
        return code
    left = [cell.name for cell in study.cells if stage_of(study_dir, cell) is not Stage.finished]
    for name in left:
        say(f"{NAME}: {name} failed: {records[name].error}")
    if left:
        again = command_line(path_override("study.dir", study_dir))
        say(f"{NAME}: {len(left)} of {len(study.cells)} runs failed; try them again: {again}")
    return FAILED if left or not_written else DONE


def summary(study: Study, study_dir: Path, records: dict[str, CellRecord]) -> str:
    """One line with the number of runs, the finished runs, and the remaining time if it can be estimated."""
    config = study.config
    done = [cell for cell in study.cells if stage_of(study_dir, cell) is Stage.finished]
    left = len(study.cells) - len(done)
    parts = (counted(len(config.modes), "mode"), counted(len(config.precisions), "precision"))
    shape = " x ".join((*parts, counted(len(config.seeds), "seed")))
    text = f"{counted(len(study.cells), 'run')} = {shape}, {config.parallel} at a time, in {study_dir}"
    if done:
        text += f"; {len(done)} are finished"
    seconds = [records[cell.name].seconds for cell in done if cell.name in records]
    if left and seconds:
        text += f", the others take about {duration(left * sum(seconds) / len(seconds) / config.parallel)}"
    return text


def render_grid(study: Study, study_dir: Path) -> str:
    """Output of --dry-run: the grid, every run, and the plan of the first run."""
    first = study.cells[0]
    lines = [("study", summary(study, study_dir, read_records(study_dir)))]
    lines.append(("steps", f"{first.num_steps} each, {first.num_steps * len(study.cells):,} together"))
    if not first.config.checkpoint.every:
        lines.append(("note", "no checkpoints: a run that is stopped begins again (checkpoint.every saves)"))
    for mode in study.config.modes:
        config = next(cell.config for cell in study.cells if cell.mode == mode)
        terms = objective(config.correction, config.loss) + reference_term(config.reference)
        lines.append(("modes", f"{mode}: {terms}"))
    for precision in study.config.precisions:
        lines.append(("precisions", f"{precision}: {' '.join(precision_words(precision))}"))
    for cell in study.cells:
        stage = stage_of(study_dir, cell)
        where = "" if stage is Stage.new else f", {logged_step(study_dir / cell.name)} of {cell.num_steps}"
        lines.append(("runs", f"{cell.name}: {stage}{where}"))
    plan = render_plan(first.config, machine=this_machine(), output_dir=study_dir / first.name)
    return "\n".join([labelled(lines), "", f"the first run, {first.name}:", plan, ""])
