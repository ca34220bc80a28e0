"""`parity study <recipe> [study.key=value ...] [key=value ...]`: words -> checked grid -> runs -> one page.

Every problem of every run is reported before a run is started. Called by `commands.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from algorithms.config import Problem
from algorithms.objective import objective, reference_term
from trainer.cli.arguments import parse_train
from trainer.cli.evaluate import flag_problems
from trainer.cli.plan import LABEL_WIDTH, render_plan
from trainer.compose.catalog import find_recipe
from trainer.compose.outcome import DONE, FAILED, report
from trainer.compose.read import read_own_keys
from trainer.limits.machine import this_machine
from trainer.rundir.redact import redact_argv
from trainer.study.cells import Stage, Standing, look, newest_study, studies_dir, study_problems
from trainer.study.config import StudyConfig, precision_words
from trainer.study.grid import Grid, compose_grid, recipe_problems
from trainer.study.progress import StudyConsole, duration
from trainer.study.run import CellRecord, parallel_problems, run_cells
from trainer.study.study_dir import read_records, taken

NAME = "parity study"
SECTION = "study"
RESUME_WORDS = ("resume=auto", "run.resume=auto")


def run_study(words: Sequence[str]) -> int:
    """Run or continue the study of `parity study <words>`; return the exit code."""
    own = [word for word in words if word.startswith(f"{SECTION}.")]
    rest = [word for word in words if word not in own and word not in RESUME_WORDS]
    if not any(not word.startswith("-") for word in rest):
        missing = Problem(key="recipe", rule="must be given", value=None, remedy=f"See {NAME} --help.")
        return report([missing], command=NAME)
    arguments, problems = parse_train(rest)
    problems += flag_problems(replace(arguments, dry_run=False), command=NAME)
    study, wrong = read_own_keys(StudyConfig, own, section=SECTION)
    problems += wrong
    recipe = find_recipe(arguments.recipe, own_dir=arguments.own_dir)
    if isinstance(recipe, Problem):
        return report([recipe, *problems], command=NAME)
    if wrong:
        found = recipe_problems(recipe, arguments.overrides, own_dir=arguments.own_dir)
        return report([*problems, *found], command=f"{NAME} {arguments.recipe}")
    grid, found = compose_grid(recipe, arguments.overrides, study, own_dir=arguments.own_dir)
    study_dir = _directory(study, recipe.stem, resumes=any(word in RESUME_WORDS for word in words))
    problems += [*found, *study_problems(study_dir, grid.cells), *parallel_problems(grid, study, this_machine())]
    if problems:
        return report(problems, command=f"{NAME} {arguments.recipe}")
    standings = [look(study_dir, cell) for cell in grid.cells]
    if arguments.dry_run:
        sys.stdout.write(render_grid(grid, standings, study, study_dir))
        return DONE
    # The recorded command omits study.dir and resume, so that it stays the same when a study is continued or moved.
    kept = [word for word in words if word not in RESUME_WORDS and not word.startswith(f"{SECTION}.dir=")]
    return _run(grid, study, study_dir, command=" ".join([NAME, *redact_argv(kept)]))


def _directory(study: StudyConfig, recipe_name: str, *, resumes: bool) -> Path:
    """Directory of the study: study.dir, else with `resumes` the newest study of the recipe, else a new directory."""
    if study.dir is not None:
        return Path(study.dir)
    newest = newest_study(recipe_name) if resumes else None
    return newest or studies_dir(recipe_name) / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"


def _run(grid: Grid, study: StudyConfig, study_dir: Path, *, command: str) -> int:
    """Run all unfinished runs, and write the page after every run."""
    with taken(study_dir) as problem:
        if problem is not None:
            return report([problem], command=NAME)
        records = read_records(study_dir)
        standings = [look(study_dir, cell) for cell in grid.cells]
        with StudyConsole() as console:
            console.line(summary(grid, standings, study, study_dir, records))
            from trainer.study.output import StudyWriter

            writer = StudyWriter(grid, study, study_dir, command=command)
            writer.try_write(records)
            request = run_cells(
                grid,
                standings,
                records,
                study=study,
                study_dir=study_dir,
                console=console,
                ended=lambda: writer.try_write(records),
            )
        sys.stdout.write(f"{writer.table(records)}\n{writer.page}\n")
    if writer.error:
        sys.stderr.write(f"{NAME}: {writer.page} could not be written ({writer.error})\n")
    if request is not None:
        sys.stderr.write(f"{NAME}: asked to end ({request.name}); go on with study.dir={study_dir}\n")
        return 128 + request
    left = [cell.name for cell in grid.cells if look(study_dir, cell).stage is not Stage.finished]
    for name in left:
        sys.stderr.write(f"{NAME}: {name} failed: {records[name].error}\n")
    if left:
        sys.stderr.write(
            f"{NAME}: {len(left)} of {len(grid.cells)} runs failed; try them again: study.dir={study_dir}\n"
        )
    return FAILED if left or writer.error else DONE


def summary(
    grid: Grid, standings: Sequence[Standing], study: StudyConfig, study_dir: Path, records: dict[str, CellRecord]
) -> str:
    """One line with the number of runs, the finished runs, and the remaining time if it can be estimated."""
    done = [standing for standing in standings if standing.stage is Stage.finished]
    left = len(standings) - len(done)
    shape = f"{len(grid.modes)} modes x {len(grid.precisions)} precisions x {len(grid.seeds)} seeds"
    text = f"{len(standings)} runs = {shape}, {study.parallel} at a time, in {study_dir}"
    if done:
        text += f"; {len(done)} are finished"
    seconds = [records[s.cell.name].seconds for s in done if s.cell.name in records]
    if left and seconds:
        text += f", the others take about {duration(left * sum(seconds) / len(seconds) / study.parallel)}"
    return text


def render_grid(grid: Grid, standings: Sequence[Standing], study: StudyConfig, study_dir: Path) -> str:
    """Output of --dry-run: the grid, every run, and the plan of the first run."""
    lines: list[tuple[str, str]] = [("study", summary(grid, standings, study, study_dir, read_records(study_dir)))]
    config = grid.cells[0].config
    lines.append(("steps", f"{config.run.num_steps} each, {config.run.num_steps * len(grid.cells):,} together"))
    if not config.checkpoint.every:
        lines.append(("note", "no checkpoints: a run that is stopped begins again (checkpoint.every saves)"))
    for mode in grid.modes:
        config = next(cell.config for cell in grid.cells if cell.mode == mode)
        terms = objective(config.correction, config.loss) + reference_term(config.reference)
        lines.append(("modes", f"{mode}: {terms}"))
    for precision in grid.precisions:
        lines.append(("precisions", f"{precision}: {' '.join(precision_words(precision))}"))
    for standing in standings:
        where = "" if standing.stage is Stage.new else f", {standing.last_step} of {standing.cell.config.run.num_steps}"
        lines.append(("runs", f"{standing.cell.name}: {standing.stage.name}{where}"))
    text, previous = [], ""
    for label, line in lines:
        text.append(f"{'' if label == previous else label:<{LABEL_WIDTH}} {line}")
        previous = label
    first = grid.cells[0]
    plan = render_plan(first.config, machine=this_machine(), output_dir=study_dir / first.name)
    return "\n".join([*text, "", f"the first run, {first.name}:", plan, ""])
