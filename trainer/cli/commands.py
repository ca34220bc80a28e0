"""Words of the command line -> exit code: `parity train`, `parity eval`, `parity recipes`, shell completion.

`train` checks all runs with `trainer/compose/compose.py` before `job.py` starts the first one. This module imports no
large package: help appears at once, and a mistake is reported before torch or Ray is loaded.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from algorithms.config import NOT_SET, ConfigError, Problem
from algorithms.config.home import from_home
from trainer.compose.catalog import find_recipe, read_card, recipe_files
from trainer.compose.keys import nearest
from trainer.compose.outcome import (
    ADAPTER_FLAG,
    BEST_FLAG,
    COMMANDS,
    COMPLETION_FLAGS,
    DONE,
    FAILED,
    INTERRUPTED,
    REFUSED,
    refuse,
    report,
)  # fmt: skip
from trainer.config.paths import recipe_dir
from trainer.config.train import GROUPS, PRESETS
from trainer.text.plain import PrintableFormatter, to_nowhere, to_stderr, to_stdout

if TYPE_CHECKING:
    from trainer.cli.arguments import TrainArguments

HELP_FLAGS = ("-h", "--help")
NOT_EXPORTED = ("data", "reward", "episode", "eval.sets")
"""Sections that an export does not read: their files may be gone, or lie beside another directory."""

HELP = """\
parity: RL training of language models that measures and corrects the rollout-training mismatch

  parity recipes                               list the recipes
  parity train <recipe> [key=value ...]        run one; a recipe is a name or a path to a .yaml file
  parity train <recipe> --dry-run              check everything and print what would run
  parity train <recipe> -m key=a,b [...]       one run per combination of the values
  parity resume <run.dir> [key=value ...]      go on with a run, with its own settings
  parity train <recipe> resume=auto            go on with the newest run of the recipe, or with run.dir=...
  parity study <recipe> [study.key=value] ...  one run per correction, rollout precision and seed, on one page
  parity eval <recipe> checkpoint=<run.dir>    accuracy, avg@k, pass@k and maj@k of a run, a model or the base model
  parity replay <run.dir> step=N               a step that was written down, under every correction
  parity diagnose <run.dir>, <bundle>          why engine and trainer disagree, cause by cause
  parity report <run.dir> [<run.dir> ...]      the page of a run, or one that compares several
  parity export <run.dir> <directory>          the newest checkpoint of a run as a Hugging Face model
  parity doctor                                check this machine
  parity train --help                          everything about train

Exit codes: 0 done, 1 the run failed, 2 nothing was started (the reason is on stderr), 3 stopped by the guard, 75 out of
time (saved, parity resume goes on), 130 ended by Ctrl-C and 143 by SIGTERM: the first one saves if checkpoint.every is
set, a second one ends the run within 10 s.
Tab completion: eval "$(parity -sc install=bash)"
"""

TRAIN_HELP = """\
parity train <recipe> [flags] [group=option ...] [key=value ...]

  <recipe>             a name from `parity recipes`, or a path to a .yaml file of your own
  group=option         {groups}
                       presets of other trainers: {presets}
  key=value            any key of the config, for example optim.lr=1e-5
  +rollout.engine_args.NAME=value
                       an option of the engine, passed through

  --dry-run            check everything, print the plan, start nothing
  -m, --multirun       one run per combination: -m correction=tis,mis run.seed=0,1
  --cfg job            print the composed config (also: hydra, all); --resolve fills in interpolations
  --package KEY        with --cfg: print this part only
  --config-dir DIR     a directory with your own recipes and group options
  --info [TOPIC]       Hydra's view: defaults, defaults-tree, config, plugins, searchpath
  --help               with a recipe: its groups and its config

Files go to run.dir (outputs/<recipe>/<time>), the runs of a sweep to hydra.sweep.dir. The last line printed by a
run is the path of its report; a sweep ends with a table and the path of one page of all its runs.
"""

USAGES = {
    "resume": (
        "parity resume <run.dir> [--dry-run] [group=option ...] [key=value ...]\n\n"
        "  <run.dir>            a run: its config.yaml is the recipe, its newest good checkpoint the start\n"
        "  key=value            what is to change, for example run.num_steps=100; everything else stays as it was\n\n"
        "  Fewer steps than the run has taken are refused. A config.yaml that changes is kept under another name.\n"
    ),
    "eval": (
        "parity eval <recipe> checkpoint=<directory or none> [--best] [--config-dir DIR] [group=option ...] "
        "[key=value ...]\n\n"
        "  checkpoint=...       a run directory (its newest good checkpoint, or with --best the best), a checkpoint,\n"
        "                       a Hugging Face directory as parity export writes it, or none: the base model\n"
        "  <recipe>             as of parity train; the config.yaml of a run is one too\n"
        "  eval.samples=32      sampled responses per prompt: k of avg@k, pass@k and maj@k; one greedy beside them\n"
        "  +eval.sets.NAME=FILE one more set, with the columns of data=file\n\n"
        "  Starts the engines of the recipe, prints a table and writes eval.json and eval.jsonl to run.dir, by\n"
        "  default outputs/evals/<recipe>/<time>.\n"
    ),
    "study": (
        "parity study <recipe> [study.key=value ...] [--dry-run] [--config-dir DIR] [group=option ...] "
        "[key=value ...]\n\n"
        "  study.modes=[tis,mis]             corrections, also presets; default: the six but custom\n"
        "  study.precisions=[bfloat16,int8]  of the engines; default: that of the recipe, and int8\n"
        "  study.seeds=[0,1,2]               values of run.seed\n"
        "  study.parallel=2                  runs at a time; default 1\n"
        "  study.dir=DIR, or resume=auto     go on with a study, or with the newest of the recipe\n"
        "  study.collapse_drop, cell_timeout_s, stop_timeout_s\n\n"
        "  Each run is a `parity train` of its own, in outputs/studies/<recipe>/<time>/<mode>-<precision>-seed<k>;\n"
        "  what is finished is not repeated. After each one study.html and study.json compare what\n"
        "  there is; see docs/study.md.\n"
    ),
    "replay": (
        "parity replay <run.dir> step=N [modes=NAME,...] [out=DIR]\n\n"
        "  step=N               a step that the run wrote down (dump.every=<steps>)\n"
        "  modes=tis,mis        modes and presets to score it under; without it all of them\n"
        "  out=DIR              where replay.json and replay.html go; without it <run.dir>/replay/step_<N>\n"
        "  bundle=FILE          write the step as a bundle too: one file for other people\n\n"
        "parity replay <bundle> [modes=NAME,...] [out=DIR] [bundle=FILE]\n\n"
        "  A step of any trainer in one safetensors file (docs/bundle.md): its mismatch, by probability and position,\n"
        "  and every correction with its defaults. Files that NeMo-RL, prime-rl, slime and miles write are read too,\n"
        "  also a directory with one file per rank.\n\n"
        "  step=N               of a directory with several rollouts: the one to take\n"
        "  bundle=FILE          write the step as a bundle\n\n"
        "  One process on the CPU: no Ray, no engine. The row of the run's own correction is what it logged, to the\n"
        "  last bit. See docs/replay.md.\n"
    ),
    "diagnose": (
        "parity diagnose <run.dir> [step=N] [tokens=1024] [device=cpu] [out=DIR]\n\n"
        "  Takes one more step from the newest checkpoint, in a directory of its own, and says why engine and\n"
        "  trainer disagree on it: causes, their parts of K3, what to change.\n\n"
        "  step=N               a step that the run wrote down (dump.every), whose weights are in a checkpoint\n"
        "  tokens=N             response tokens to judge; each is scored a few hundred times\n"
        "  out=DIR              where diagnosis.json and diagnosis.html go; without it <run.dir>/diagnosis\n\n"
        "parity diagnose <bundle> [model=DIR] [older=DIR,...] [key=value ...]\n\n"
        "  A step of any trainer (docs/bundle.md) with token_ids, prompt_ids and prompt_lengths.\n\n"
        "  model=DIR            the weights that sampled, as transformers loads them; without it only the numbers\n"
        "                       are judged\n"
        "  older=DIR,...        weights before, newest first: to recognise stale ones\n"
        "  temperature=, trainer_dtype=, rollout_dtype=, quantization=\n"
        "                       what the bundle does not say of itself\n\n"
        "  See docs/diagnose.md.\n"
    ),
    "export": (
        "parity export <run.dir> <directory> [--best] [--adapter] [model.path=DIR]\n\n"
        "  Write the newest good checkpoint of a run as a Hugging Face model with its tokenizer,\n"
        "  or with --best the one that checkpoint.best_metric kept. Another one is named itself:\n"
        "  <run.dir>/checkpoints/step_000020. <directory> must not exist.\n"
        "  Of a LoRA run (policy.lora.rank) the adapter is added to the weights; with --adapter it is\n"
        "  written by itself, as peft reads it.\n"
        "  model.path=DIR is where the model lies now that the run began with; no data are needed.\n"
    ),
    "report": (
        "parity report <run.dir> [<run.dir> ...] [-o FILE]\n\n"
        "  <run.dir>            directory of a run, also of one that is still running; or one bundle of any trainer,\n"
        "                       whose page is <bundle>.html (docs/bundle.md)\n"
        "  -o, --out FILE       the page; without it report.html of the run, or comparison.html here for several.\n"
        "                       An older page is replaced.\n\n"
        "  Writes one HTML file that opens offline and prints its path. Several runs: one curve each, what differs in\n"
        "  their configuration, and their headline numbers. See docs/reading_a_report.md.\n"
    ),
    "recipes": "parity recipes\n\n  List the recipes of the project: question, hardware, whether it was verified.\n",
    "doctor": "parity doctor\n\n  Check this machine, a line per check. Exit code 0 if a run is possible, else 1.\n",
}


def run(words: Sequence[str]) -> int:
    """Run one command; return its exit code."""
    if logging.lastResort is not None:  # writes the warnings that come while there is no console
        logging.lastResort.setFormatter(PrintableFormatter())
    try:
        return _dispatch(list(words))
    except KeyboardInterrupt:
        to_stderr("parity: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        to_nowhere(sys.stdout)
        return DONE
    except ConfigError as error:  # of a word that composes no config
        return report(error.problems, command=f"parity {words[0]}")
    except PermissionError as error:
        command = f"parity {words[0]}"
        return refuse(
            command, "file", "must be open to this user", str(error.filename), "Run as its owner, or copy it."
        )


def _dispatch(words: list[str]) -> int:
    if words and words[0] in COMPLETION_FLAGS:
        from trainer.cli.completion import complete

        return complete(words)
    if not words:
        to_stderr(HELP)
        return REFUSED
    command, rest = words[0], words[1:]
    if command in HELP_FLAGS:
        to_stdout(HELP)
        return DONE
    if command == "--version":
        to_stdout(f"parity-rl {version('parity-rl')}\n")
        return DONE
    if command == "train":
        return _train(rest)
    if command not in COMMANDS:
        close = nearest(command, COMMANDS)
        hint = f"Did you mean parity {close}? " if close else ""
        return refuse("parity", "command", "is not known", command, f"{hint}See parity --help.")
    if any(flag in rest for flag in HELP_FLAGS):
        to_stdout(USAGES[command])
        return DONE
    match command:
        case "resume":
            return _resume(rest)
        case "study":
            from trainer.cli.study import run_study as run_command
        case "eval":
            from trainer.cli.evaluate import run_eval as run_command
        case "replay":
            from trainer.cli.replay import run_replay as run_command
        case "diagnose":
            from trainer.cli.diagnose import run_diagnose as run_command
        case "report":
            from trainer.cli.report import run_report as run_command
        case "export":
            return _export(rest)
        case _ if rest:
            return refuse(f"parity {command}", f"parity {command}", "takes no arguments", " ".join(rest))
        case "recipes":
            return _recipes()
        case _:
            return _doctor()
    return run_command(rest)


def _recipes() -> int:
    from rich.console import Console
    from rich.table import Table

    table = Table("recipe", "question", "hardware", "verified", box=None, pad_edge=False, header_style="bold")
    for path in recipe_files(recipe_dir()).values():
        card = read_card(path)
        table.add_row(card.name, card.question, card.hardware, card.verified)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200).print(table)
    return DONE


def _doctor() -> int:
    from trainer.cli.doctor import examine, render

    findings = examine()
    to_stdout(render(findings))
    return DONE if findings.engines else FAILED


def _export(words: list[str]) -> int:
    command = "parity export"
    best, adapter = BEST_FLAG in words, ADAPTER_FLAG in words
    words = [word for word in words if word not in (BEST_FLAG, ADAPTER_FLAG)]
    if unknown := [word for word in words if word.startswith("-")]:
        remedy = f"{command} takes {BEST_FLAG} and {ADAPTER_FLAG}."
        return refuse(command, "flag", "is not known", " ".join(unknown), remedy)
    moved = [word for word in words if word.startswith("model.")]
    words = [word for word in words if word not in moved]
    if len(words) != 2:
        return refuse(command, command, "takes a run directory and a new directory", " ".join(words))
    given = Path(from_home(words[0], key="run.dir"))
    directory = Path(from_home(words[1], key="directory"))
    from trainer.config.outputs import CHECKPOINTS
    from trainer.rundir.run_dir import runs_inside, unusable_problem

    is_step = given.absolute().parent.name == CHECKPOINTS
    run_dir = given.absolute().parents[1] if is_step else given
    recipe = run_dir / "config.yaml"
    if not recipe.is_file() or not given.is_dir():
        saved = ", ".join(sorted(path.name for path in (run_dir / CHECKPOINTS).glob("step_*")))
        remedy = f"Checkpoints of the run: {saved}." if saved else runs_inside(given)
        rule = "must be the directory of a run, with its config.yaml, or a checkpoint of one"
        return refuse(command, "run.dir", rule, str(given), remedy)
    if is_step and best:
        return refuse(command, BEST_FLAG, "needs a run directory", str(given), "Leave it out.")
    from trainer.compose.compose import resolve

    resolution = resolve(recipe.resolve(), moved, own_dir=None, multirun=False, unneeded=NOT_EXPORTED)
    config = resolution.runs[0].config
    if config is None:
        return report(resolution.problems, command=command)
    if directory.exists():
        return refuse(command, "directory", "must not exist", str(directory), "Name another one, or remove it.")
    if (unusable := unusable_problem("directory", directory)) is not None:
        return report([unusable], command=command)
    from trainer.rundir.checkpoint import CheckpointError, checkpoint_at, chosen_checkpoint

    try:
        checkpoint = checkpoint_at(given) if is_step else chosen_checkpoint(config, run_dir, best=best)
    except CheckpointError as error:
        return report([str(error)], command=command)
    from trainer.rundir.resume import lora_of

    if adapter and not lora_of(checkpoint.state.config).rank:
        remedy = "Leave it out: the whole model is written."
        return refuse(command, ADAPTER_FLAG, "needs a run with policy.lora.rank above 0", str(given), remedy)
    # Imported late, because this line imports torch and transformers.
    from rollout.data.tokenizer import auto_tokenizer_note
    from trainer.models.description import release_4_note
    from trainer.models.export import write_adapter, write_model
    from trainer.rundir.run_dir import StartError

    try:
        (write_adapter if adapter else write_model)(config, checkpoint, directory)
    except StartError as error:
        return report(list(error.problems), command=command)
    except CheckpointError as error:  # of files that agree with their manifest and still are no weights
        to_stderr(f"{command}: {error}\n")
        return FAILED
    what = "the adapter of the policy" if adapter else "the policy"
    to_stdout(f"{directory}: {what} after step {checkpoint.state.step}\n")
    notes = [auto_tokenizer_note(directory), "" if adapter else release_4_note(directory)]
    to_stderr("".join(f"note: {note}\n" for note in notes if note))
    return DONE


def _train(words: list[str]) -> int:
    command = "parity train"
    if not any(not word.startswith("-") for word in words):
        if any(flag in words for flag in HELP_FLAGS):
            groups, presets = (
                "  ".join(f"{group}={'|'.join(options)}" for group, options in table.items())
                for table in (GROUPS, PRESETS)
            )
            to_stdout(TRAIN_HELP.format(groups=groups, presets=presets))
            return DONE
        names = ", ".join(recipe_files(recipe_dir()))
        return refuse(command, "recipe", "is missing", NOT_SET, f"{command} <recipe>; recipes: {names}.")
    from trainer.cli.arguments import parse_train

    arguments, problems = parse_train(words)
    recipe = find_recipe(arguments.recipe, own_dir=arguments.own_dir)
    if isinstance(recipe, Problem):
        return report([recipe, *problems], command=command)
    return _checked_train(recipe, arguments, problems, command=f"{command} {arguments.recipe}")


def _resume(words: list[str]) -> int:
    from trainer.cli.arguments import parse_train
    from trainer.cli.resume import COMMAND, recorded_recipe, resume_words
    from trainer.rundir.run_dir import CONFIG_FILE

    if not words or words[0].startswith("-"):
        return refuse(COMMAND, "run.dir", "is missing", NOT_SET, f"{COMMAND} <run.dir> [key=value ...].")
    run_dir = Path(from_home(words[0], key="run.dir")).absolute()
    with recorded_recipe(run_dir, words[1:]) as recipe:
        if isinstance(recipe, Problem):
            return report([recipe], command=COMMAND)
        overrides, refused = resume_words(run_dir, words[1:])
        arguments, problems = parse_train([recipe.stem, *overrides])
        # The file of the recipe is a temporary copy: problems name the config.yaml of the run instead.
        own = run_dir / CONFIG_FILE
        return _checked_train(recipe, arguments, [*refused, *problems], command=f"{COMMAND} {words[0]}", shown_as=own)


def _checked_train(
    recipe: Path,
    arguments: TrainArguments,
    problems: list[Problem],
    *,
    command: str,
    shown_as: Path | None = None,
) -> int:
    """Resolve all runs, report all problems together, then print the plan or start the runs.

    If `shown_as` is given, problems name this file instead of `recipe`.
    """
    from trainer.cli.job import launch, load_tasks
    from trainer.cli.resume import resolve_start
    from trainer.cli.sweep import place_in_wandb

    if arguments.inspection is not None:
        return _inspect(recipe, arguments, problems, command=command)
    resolution, found = resolve_start(recipe, arguments, shown_as=shown_as)
    if resolution.multirun and not problems and not found:
        place_in_wandb(resolution)
    if arguments.dry_run:
        refused: Sequence[Problem | str] = [*problems, *found]
        notes: list[str] = []
        if not refused:
            refused, notes = load_tasks(resolution)
        if not resolution.problems and not problems:  # a plan of words that were not understood would be another run's
            from trainer.cli.plan import render_plans

            to_stdout(render_plans(resolution, data=notes))
        # Last: what is wrong must not scroll away.
        return report(refused, command=command) if refused else DONE
    return report([*problems, *found], command=command) if problems or found else launch(resolution, command=command)


def _inspect(recipe: Path, arguments: TrainArguments, problems: list[Problem], *, command: str) -> int:
    """Show what Hydra composes, also of an incomplete or invalid config, with a note that the run would be refused."""
    from trainer.cli.show import show
    from trainer.compose.compose import hydra_problems, resolve
    from trainer.compose.overrides import override_words

    own_dir = arguments.own_dir
    problems += hydra_problems(recipe, arguments.overrides, own_dir=own_dir)
    if problems:
        return report(problems, command=command)
    resolution = resolve(recipe, arguments.overrides, own_dir=own_dir, multirun=False)
    refused = resolution.problems
    overrides = [*arguments.overrides, *override_words(resolution.runs[0].from_home)]
    if said := show(recipe, arguments.hydra_flags, overrides, own_dir=own_dir):
        return report(refused or [said], command=command)
    if refused:
        to_stderr(f"note: a run with this configuration is refused, the first reason is: {refused[0]}\n")
    return DONE
