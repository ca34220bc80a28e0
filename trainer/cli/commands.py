"""Words of the command line -> exit code: help, and the command, each in a module of its own.

This module imports no large package: help appears at once.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version

from algorithms.config import ConfigError
from trainer.compose.catalog import read_card, recipe_files
from trainer.compose.keys import nearest
from trainer.compose.outcome import (
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

HELP_FLAGS = ("-h", "--help")

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
    if command not in COMMANDS:
        close = nearest(command, COMMANDS)
        hint = f"Did you mean parity {close}? " if close else ""
        return refuse("parity", "command", "is not known", command, f"{hint}See parity --help.")
    if any(flag in rest for flag in HELP_FLAGS) and (command != "train" or all(word.startswith("-") for word in rest)):
        to_stdout(_train_help() if command == "train" else USAGES[command])
        return DONE
    match command:
        case "train":
            from trainer.cli.train import run_train as run_command
        case "resume":
            from trainer.cli.train import run_resume as run_command
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
            from trainer.cli.export import run_export as run_command
        case _ if rest:
            return refuse(f"parity {command}", f"parity {command}", "takes no arguments", " ".join(rest))
        case "recipes":
            return _recipes()
        case _:
            return _doctor()
    return run_command(rest)


def _train_help() -> str:
    groups, presets = (
        "  ".join(f"{group}={'|'.join(options)}" for group, options in table.items()) for table in (GROUPS, PRESETS)
    )
    return TRAIN_HELP.format(groups=groups, presets=presets)


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
