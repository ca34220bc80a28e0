"""`parity train <recipe>` and `parity resume <run.dir>`: words -> every run, checked, then its plan or its jobs.

All problems of all runs are reported together before torch or Ray is loaded. Called by `commands.py`; `diagnose.py`
trains one more step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from algorithms.config import NOT_SET, Problem
from algorithms.config.home import from_home
from trainer.cli.arguments import RecipeArguments, parse_recipe
from trainer.cli.job import launch, load_tasks
from trainer.cli.parsers import ON
from trainer.cli.plan import render_plans
from trainer.cli.resume import COMMAND as RESUME
from trainer.cli.resume import recorded_recipe, resolve_start, resume_words
from trainer.cli.sweep import COMMAND, place_in_wandb
from trainer.compose.catalog import find_recipe, recipe_files
from trainer.compose.compose import resolve, tree_text
from trainer.config.paths import recipe_dir
from trainer.config.train import TrainConfig
from trainer.config.training import HFModelConfig
from trainer.ending.exit_codes import DONE, refuse, report
from trainer.limits.elsewhere import elsewhere_problems
from trainer.limits.gpus import Gpus
from trainer.limits.memory_plan import memory_plan
from trainer.limits.model_shape import UnknownShapeError, model_directory
from trainer.rundir.run_dir import CONFIG_FILE
from trainer.start.task_check import context_problems, engine_problems, missing_model_problems
from trainer.text.plain import command_line, to_stderr, to_stdout


def run_train(words: Sequence[str]) -> int:
    """Run `parity train <words>`; return the exit code."""
    arguments, problems = parse_recipe(words)
    if not arguments.recipe:
        names = ", ".join(recipe_files(recipe_dir()))
        return refuse(COMMAND, "recipe", "is missing", NOT_SET, f"{COMMAND} <recipe>; recipes: {names}.")
    recipe = find_recipe(arguments.recipe, own_dir=arguments.own_dir)
    if isinstance(recipe, Problem):
        return report([recipe, *problems], command=COMMAND)
    return _checked_train(recipe, arguments, problems, command=command_line(*COMMAND.split(), arguments.recipe))


def run_resume(words: Sequence[str]) -> int:
    """Run `parity resume <words>`; return the exit code."""
    arguments, problems = parse_recipe(words, command="resume")
    if not arguments.recipe:
        return refuse(RESUME, "run.dir", "is missing", NOT_SET, f"{RESUME} <run.dir> [key=value ...].")
    run_dir = Path(from_home(arguments.recipe, key="run.dir")).absolute()
    with recorded_recipe(run_dir, arguments.overrides) as recipe:
        if isinstance(recipe, Problem):
            return report([recipe, *problems], command=RESUME)
        overrides, refused = resume_words(run_dir, arguments.overrides)
        own = replace(arguments, overrides=tuple(overrides))
        # The file of the recipe is a temporary copy: problems name the config.yaml of the run instead.
        command, shown_as = command_line(*RESUME.split(), arguments.recipe), run_dir / CONFIG_FILE
        return _checked_train(recipe, own, [*refused, *problems], command=command, shown_as=shown_as)


def _checked_train(
    recipe: Path,
    arguments: RecipeArguments,
    problems: list[Problem],
    *,
    command: str,
    shown_as: Path | None = None,
) -> int:
    """Resolve all runs, report all problems together, then print the plan or start the runs.

    If `shown_as` is given, problems name this file instead of `recipe`.
    """
    if arguments.shows_config:
        return _show(recipe, arguments, problems, command=command)
    if arguments.elsewhere is not None:
        return _plan_elsewhere(recipe, arguments, problems, arguments.elsewhere, command=command)
    if any(problem.key == ON for problem in problems):  # what this machine lacks is no problem of GPUs elsewhere
        return report(problems, command=command)
    resolution, found = resolve_start(recipe, arguments, shown_as=shown_as)
    if resolution.multirun and not problems and not found:
        place_in_wandb(resolution)
    if arguments.dry_run:
        refused: Sequence[Problem | str] = [*problems, *found]
        notes: list[str] = []
        if not refused:
            refused, notes = load_tasks(resolution)
        if not resolution.problems and not problems:  # a plan of words that were not understood would be another run's
            to_stdout(render_plans(resolution, data=notes))
        # Last: what is wrong must not scroll away.
        return report(refused, command=command) if refused else DONE
    return report([*problems, *found], command=command) if problems or found else launch(resolution, command=command)


def _plan_elsewhere(
    recipe: Path, arguments: RecipeArguments, problems: list[Problem], gpus: Gpus, *, command: str
) -> int:
    """Print the plan for GPUs that are elsewhere: of model and data nothing is read but the sizes in config.json."""
    resolution = resolve(recipe, arguments.overrides, own_dir=arguments.own_dir, multirun=arguments.multirun)
    problems += resolution.problems
    configs = [run.config for run in resolution.runs if run.config is not None]
    models = {str(config.model): config.model for config in configs}.values()
    of_hub = [each for each in models if isinstance(each, HFModelConfig) and not Path(each.path).is_dir()]
    problems += missing_model_problems(of_hub)  # it fetches config.json
    if problems:
        return report(problems, command=command)
    to_stdout(render_plans(resolution, data=[], gpus=gpus))
    plans = (memory_plan(config, device_bytes=gpus.memory) for config in configs)
    found = [problem for plan in plans for problem in elsewhere_problems(plan, gpus)]
    found += [problem for config in configs for problem in _described_problems(config)]
    return report(found, command=command) if found else DONE


def _described_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield why the model of a config.json does not suit the engines of the run."""
    if not isinstance(config.model, HFModelConfig):
        return
    try:
        directory = model_directory(config.model.path, config.model.revision)
    except UnknownShapeError:
        return  # the plan says so
    yield from engine_problems(config, directory)
    yield from context_problems(config, directory, longest_prompt=None)


def _show(recipe: Path, arguments: RecipeArguments, problems: list[Problem], *, command: str) -> int:
    """Print the composed config, also of one whose values break a rule, with a note that the run would be refused."""
    resolution = resolve(recipe, arguments.overrides, own_dir=arguments.own_dir, multirun=False)
    [run], refused = resolution.runs, resolution.problems
    of_words = [problem for problem in refused if problem not in run.problems]
    if problems or of_words or run.tree is None:
        return report([*problems, *refused], command=command)
    text = tree_text(run.tree, arguments.package, resolve=arguments.resolves)
    if isinstance(text, Problem):
        return report([text], command=command)
    to_stdout(text)
    if refused:
        to_stderr(f"note: a run with this configuration is refused, the first reason is: {refused[0]}\n")
    return DONE
