"""Words of the command line -> exit code: help, and the command, each in a module of its own.

This module imports no large package: help appears at once.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version

from algorithms.config import ConfigError
from trainer.cli.parsers import COMPLETION, HELP_FLAGS, PARSERS
from trainer.compose.catalog import read_card, recipe_files
from trainer.compose.unknown_keys import nearest
from trainer.config.paths import recipe_dir
from trainer.ending.exit_codes import DONE, FAILED, INTERRUPTED, REFUSED, refuse, report
from trainer.text.plain import PrintableFormatter, to_nowhere, to_stderr, to_stdout

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
  parity port <script>                         a script of verl, TRL, slime or miles as a recipe
  parity doctor                                check this machine
  parity train --help                          everything about train

Exit codes: 0 done, 1 the run failed, 2 nothing was started (the reason is on stderr), 3 stopped by the guard, 75 out of
time (saved, parity resume goes on), 130 ended by Ctrl-C and 143 by SIGTERM: the first one saves if checkpoint.every is
set, a second one ends the run within 10 s.
Tab completion: complete -o default -o nospace -C "parity -sc" parity
"""


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
    if words[:1] == [COMPLETION]:
        from trainer.cli.completion import complete

        return complete(words[1:])
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
    if command not in PARSERS:
        close = nearest(command, PARSERS)
        hint = f"Did you mean parity {close}? " if close else ""
        return refuse("parity", "command", "is not known", command, f"{hint}See parity --help.")
    if any(flag in rest for flag in HELP_FLAGS):
        to_stdout(PARSERS[command].format_help())
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
        case "port":
            from trainer.cli.port import run_port as run_command
        case "export":
            from trainer.cli.export import run_export as run_command
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
