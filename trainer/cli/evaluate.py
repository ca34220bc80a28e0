"""`parity eval <recipe> checkpoint=... [key=value ...]`: words -> checked config and source -> evaluation -> table.

All problems are reported together before torch or Ray is loaded. Called by `commands.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from algorithms.config import NOT_SET, ConfigError, Problem
from rollout.config import EngineConfig, Quantization
from trainer.cli.arguments import parse_recipe
from trainer.cli.parsers import BEST
from trainer.cli.tables import rows_text
from trainer.compose.catalog import find_recipe
from trainer.compose.compose import Resolution, resolve
from trainer.config.train import TrainConfig
from trainer.config.training import HFModelConfig
from trainer.ending.exit_codes import DONE, refuse, report
from trainer.ending.termination import RunTerminated, termination_requests
from trainer.limits.adapter_shape import linear_shapes
from trainer.limits.model_shape import UnknownShapeError
from trainer.models.adapter import read_adapter
from trainer.rundir.checkpoint import Checkpoint, CheckpointError, best_problem
from trainer.rundir.model_mark import model_mark
from trainer.rundir.weights_source import BASE, KEY, SourceKind, WeightsSource, checkpoint_of, find_source
from trainer.start.checks import start_problems
from trainer.start.task_check import find_model, policy_problems
from trainer.text.plain import to_stderr, to_stdout

if TYPE_CHECKING:
    from rollout.collect.evaluate import EvalResult

NAME = "parity eval"
TRAINING = (
    "advantage", "batch", "checkpoint", "collect", "correction", "critic", "dump", "guard", "loss", "optim", "policy",
    "reference", "schedule",
)  # fmt: skip
"""Sections that say how a run trains."""
UNREAD = ("advantage", "batch", "collect.filter", "correction", "critic", "guard", "loss", "reference", "tracking")
"""Keys of which an evaluation reads no value: the files of their classes may be gone."""


def run_eval(words: Sequence[str]) -> int:
    """Run `parity eval <words>`; return the exit code."""
    given = [word.partition("=")[2] for word in words if word.startswith(f"{KEY}=")]
    arguments, problems = parse_recipe([word for word in words if not word.startswith(f"{KEY}=")], command="eval")
    if not arguments.recipe:
        return refuse(NAME, "recipe", "is missing", NOT_SET, f"{NAME} <recipe>; see {NAME} --help.")
    source = _source(given, best=arguments.best, problems=problems)
    recipe = find_recipe(arguments.recipe, own_dir=arguments.own_dir)
    if isinstance(recipe, Problem):
        return report([recipe, *problems], command=NAME)
    resolution = resolve(recipe, arguments.overrides, own_dir=arguments.own_dir, multirun=False, unneeded=UNREAD)
    resolution = _set_apart(resolution)
    problems += [*resolution.problems, *start_problems(resolution, trains=False)]
    [run] = resolution.runs
    if run.config is not None:
        problems += run.config.rollout.use_problems(run.config.engine_use(trains=False))
        problems += [] if source is None else _weights_problems(run.config, source)
    if problems or source is None or run.config is None:
        return report(problems, command=f"{NAME} {arguments.recipe}")
    try:
        checkpoint = checkpoint_of(run.config, source)
    except CheckpointError as error:
        rule = "must hold good weights of the model of the recipe"
        return refuse(f"{NAME} {arguments.recipe}", KEY, rule, given[0], str(error))
    if idle := [word for word in run.overrides if re.split(r"[.=]", word.lstrip("+~"))[0] in TRAINING]:
        to_stderr(f"note: without effect in an evaluation, which trains nothing: {', '.join(idle)}\n")
    return _evaluate(run.config, source, checkpoint, resolution.run_dir(0))


def _source(given: list[str], *, best: bool, problems: list[Problem]) -> WeightsSource | None:
    """Source of the weights to evaluate; None if it is unknown, with an entry in `problems`."""
    if len(given) != 1:
        remedy = f"a run directory, a checkpoint in it, an exported model, or {BASE} for the base model."
        rule, value = ("must be given once", " ".join(given)) if given else ("is missing", NOT_SET)
        problems.append(Problem(key=KEY, rule=rule, value=value, remedy=f"{KEY}=... is one of: {remedy}"))
        return None
    try:
        source = find_source(given[0], best=best)
    except ConfigError as error:
        problems += error.problems
        return None
    if isinstance(source, Problem):
        problems.append(source)
        return None
    if best and source.kind is not SourceKind.run:
        problems.append(Problem(key=BEST, rule="needs a run directory", value=given[0], remedy="Leave it out."))
    return source


def _set_apart(resolution: Resolution) -> Resolution:
    """Put a directory named after the time below outputs/evals: beside training runs it would look like one."""
    [run] = resolution.runs
    if run.output_dir is None or not run.named_after_time:
        return resolution
    of_recipe = run.output_dir.parent
    directory = of_recipe.parent / "evals" / of_recipe.name / run.output_dir.name
    if run.config is not None:
        run.config.run.dir = str(directory)
    return replace(resolution, runs=(replace(run, output_dir=directory),))


def _weights_problems(config: TrainConfig, source: WeightsSource) -> Iterator[Problem]:
    """Yield the problems of the model: all weights but those of an exported model need the model of the config.

    And of --best, for a run that kept no best checkpoint.
    """
    if source.kind is not SourceKind.model:
        yield from policy_problems(config)
        if source.kind is SourceKind.adapter:
            try:
                shapes: Mapping[str, tuple[int, ...]] | None = linear_shapes(config)
            except UnknownShapeError:
                shapes = None
            model = config.model
            directory = Path(model.path) if isinstance(model, HFModelConfig) else None
            mark = model_mark(directory) if directory is not None and directory.is_dir() else None
            if isinstance(read := read_adapter(KEY, source.path, shapes, mark=mark), Problem):
                yield read
    elif isinstance(found := find_model(KEY, str(source.path), None), Problem):
        yield found
    if source.best and source.kind is SourceKind.run and (problem := best_problem(config, source.path)) is not None:
        yield problem


def _evaluate(config: TrainConfig, source: WeightsSource, checkpoint: Checkpoint | None, run_dir: Path) -> int:
    # Imported late, because these lines import torch, Ray and transformers.
    from trainer.cli.job import failed
    from trainer.run.evaluation import evaluate_model

    def say(line: str) -> None:
        to_stdout(f"{line}\n")

    try:
        with termination_requests():
            evaluated = evaluate_model(config, source, checkpoint=checkpoint, run_dir=run_dir, say=say)
    except RunTerminated as ended:
        to_stderr(f"{NAME}: {ended}\n")
        return ended.exit_code
    except Exception as error:
        return failed(error, run_dir, command=NAME)
    to_stdout(render_results(evaluated.results, config.rollout))
    for name, result in evaluated.results.items():
        if result.num_failed or result.num_unscored:
            counts = f"{result.num_failed} responses failed and {result.num_unscored} have no reward"
            to_stdout(f"{name}: {counts}; they count as incorrect\n")
    to_stdout(f"{evaluated.result_path}\n")
    return DONE


def render_results(results: Mapping[str, EvalResult], rollout: EngineConfig) -> str:
    """Table with one row per set and the type of the engines; the number after +- is the standard error over
    prompts."""
    types = [rollout.dtype.name] + ([] if rollout.quantization is Quantization.none else [rollout.quantization.name])
    first = next(iter(results.values()))
    many = first.num_samples > 1
    passes = [k for k in first.pass_at if k > 1] if many else []
    majority = [f"maj@{first.num_samples}"] if many else []
    titles = ["set", "prompts", "type", "greedy", f"avg@{first.num_samples}", *(f"pass@{k}" for k in passes), *majority]
    rows = [[*titles, "tokens", "truncated"]]
    for name, result in results.items():
        shares = [_share(result.accuracy, result.accuracy_error), _share(result.accuracy_sampled, result.sampled_error)]
        shares += [*(_share(result.pass_at[k]) for k in passes), *(_share(result.majority) for _ in majority)]
        cells = [f"{result.response_tokens_mean:.1f}", _share(result.truncated_frac)]
        rows.append([name, str(result.num_prompts), "+".join(types), *shares, *cells])
    return rows_text(rows, num_words=1)


def _share(value: float | None, error: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if error is None else f"{value:.3f} +- {error:.3f}"
