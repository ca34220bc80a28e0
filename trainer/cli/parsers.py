"""What each command takes: its flags, its usage and its help. Imports no large package, so that help appears at once.

Flags go through argparse. Words of the form key=value stay words: of the config, or of the command itself.
"""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentError, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from algorithms.config import Problem
from algorithms.config.rules import describe
from trainer.compose.peers import peer_hint
from trainer.compose.unknown_keys import nearest
from trainer.config.train import GROUPS, PRESETS, TrainConfig

BEST = "--best"
ADAPTER = "--adapter"
DRY_RUN = "--dry-run"
ON = "--on"
HELP_FLAGS = ("-h", "--help")
COMPLETION = "-sc"
_VALUE = re.compile(r"\d[\d.]*(e-?\d+)?|true|false|[~./].*", re.IGNORECASE)
"""A word behind an unknown flag that can only be its value."""


class CommandParser(ArgumentParser):
    """The flags of one command, which may stand anywhere among its words."""

    def __init__(self, text: str, *flags: ArgumentParser) -> None:
        """`text`: the usage, an empty line, and what the words mean and the command does."""
        usage, _, description = text.partition("\n\n")
        super().__init__(
            prog=" ".join(usage.split()[:2]),
            usage=usage.replace("\n", "\n       "),
            description=description,
            formatter_class=lambda prog: RawDescriptionHelpFormatter(prog, max_help_position=23, width=120),
            parents=flags,
            add_help=False,
            allow_abbrev=False,
        )
        self.add_argument("words", nargs="*", help=SUPPRESS)
        self.add_argument(*HELP_FLAGS, action="store_true", help="show this")

    def error(self, message: str) -> NoReturn:
        """Raise ArgumentError: argparse would end the process before the other problems are known."""
        raise ArgumentError(None, message)

    @property
    def flags(self) -> list[str]:
        """The long name of every flag."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def takes_value(self, flag: str) -> bool:
        """True if the word after `flag` is its value."""
        action = self._option_string_actions.get(flag)
        return action is not None and action.nargs is None

    def read(self, words: Sequence[str]) -> tuple[Namespace, list[Problem]]:
        """(The value of each flag, and in `words` what is no flag; a Problem for each unusable flag)."""
        problems: list[Problem] = []
        try:
            parsed, unknown = self.parse_known_intermixed_args(words)
            unknown = [word for word in unknown if word.startswith("-")]
            if unknown:
                # Words behind an unknown flag were not sorted: sort again without the flag, and without its value if it
                # is a flag of another command.
                valued = [flag for flag in unknown if any(parser.takes_value(flag) for parser in PARSERS.values())]
                kept, flags = list[str](), list[str]()
                for before, word in zip(["", *words], words, strict=False):
                    if word in unknown:
                        flags.append(word)
                    elif before in unknown and "=" not in before and _is_value(word, before, kept):
                        flags[-1] += f"={word}"
                    elif before not in valued:
                        kept.append(word)
                unknown = flags
                parsed, _ = self.parse_known_intermixed_args(kept)
        except ArgumentError as error:
            # The words that belong to the flag are unknown, so the others cannot be checked.
            problems.append(Problem(key="flags", rule=f"cannot be read ({error})", value=" ".join(words)))
            parsed, unknown = self.parse_args([word for word in words if not word.startswith("-")][:1]), []
        return parsed, [*problems, *map(self._unknown, unknown)]

    def _unknown(self, flag: str) -> Problem:
        name, _, value = flag.partition("=")
        close = nearest(name, self.flags)
        elsewhere = [parser.prog for parser in PARSERS.values() if name in parser._option_string_actions]
        hint = peer_hint(name.lstrip("-").split("."), value or "true")
        if not hint and elsewhere:
            hint = f"It is a flag of {', '.join(elsewhere)}."
        elif not hint and close:
            hint = f"Did you mean {close}?"
        elif not hint and "=" in self.format_usage():
            hint = f"Keys have no dashes: {_key_of(name.lstrip('-'))}={value or '<value>'}."
        remedy = f"{hint} See {self.prog} --help.".strip()
        return Problem(key="flag", rule="is not known", value=flag, remedy=remedy)


def _is_value(word: str, flag: str, before: Sequence[str]) -> bool:
    """True if `word` belongs to an unknown `flag`: it is no name, or a trainer has the flag and a recipe is there."""
    has_recipe = any("=" not in each for each in before)
    is_of_peer = bool(peer_hint(flag.lstrip("-").split("."), "true"))
    return _VALUE.fullmatch(word) is not None or (has_recipe and is_of_peer and not re.match(r"-|\+*[\w./@]+=", word))


def _key_of(name: str) -> str:
    """The key of the config that a flag without its dashes means: "num-steps" is run.num_steps; else `name` itself."""
    keys = [each.key for each in describe(TrainConfig)]
    found = [key for key in keys if key.rpartition(".")[2] == name.replace("-", "_")]
    return found[0] if len(found) == 1 and name not in keys else name


def _flag(*names: str, **how: Any) -> ArgumentParser:
    """A flag that several commands share."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument(*names, **how)
    return parser


_DRY_RUN = _flag(DRY_RUN, action="store_true", help="check everything, print the plan, start nothing")
_ON = _flag(ON, metavar="GPUS", help="print the plan for GPUs elsewhere, for example 8xH100-80GB; start nothing")
_MULTIRUN = _flag("-m", "--multirun", action="store_true", help="one run per combination of the values")
_CONFIG_DIR = _flag("-cd", "--config-dir", metavar="DIR", help="a directory with your own recipes and group options")
_BEST = _flag(BEST, action="store_true", help="of a run: the checkpoint that checkpoint.best_metric kept")
_ADAPTER = _flag(ADAPTER, action="store_true", help="of a LoRA run: write the adapter by itself, as peft reads it")
_OUT = _flag("-o", "--out", metavar="FILE", help="the page; else report.html of the run, comparison.html for several")
_SHOWING = (
    _flag("-c", "--cfg", choices=("job",), metavar="job", help="print the composed config, start nothing"),
    _flag("--resolve", action="store_true", help="with --cfg: fill in interpolations"),
    _flag("-p", "--package", metavar="KEY", help="with --cfg: print this part only"),
)


def _options(groups: Mapping[str, Iterable[str]]) -> str:
    return "  ".join(f"{group}={'|'.join(options)}" for group, options in groups.items())


_ALL = (
    CommandParser(f"""\
parity train <recipe> [flags] [group=option ...] [key=value ...]

  <recipe>             a name from `parity recipes`, or a path to a .yaml file of your own
  group=option         {_options(GROUPS)}
                       presets of other trainers: {_options(PRESETS)}
  key=value            any key of the config, for example optim.lr=1e-5
  key=value,value      with -m, for example -m correction=tis,mis run.seed=0,1
  +rollout.engine_args.NAME=value
                       an option of the engine, passed through

  Files go to run.dir (outputs/<recipe>/<time>), the runs of a sweep to hydra.sweep.dir. The last line printed by a
  run is the path of its report; a sweep ends with a table and the path of one page of all its runs.
""", _DRY_RUN, _ON, _MULTIRUN, *_SHOWING, _CONFIG_DIR),
    CommandParser("""\
parity resume <run.dir> [flags] [group=option ...] [key=value ...]

  <run.dir>            a run: its config.yaml is the recipe, its newest good checkpoint the start
  key=value            what is to change, for example run.num_steps=100; everything else stays as it was

  Fewer steps than the run has taken are refused. A config.yaml that changes is kept under another name.
""", _DRY_RUN, *_SHOWING, _CONFIG_DIR),
    CommandParser("""\
parity study <recipe> [study.key=value ...] [flags] [group=option ...] [key=value ...]

  study.modes=[tis,mis]             corrections, also presets; default: the six but custom
  study.precisions=[bfloat16,int8]  of the engines; default: that of the recipe, and int8
  study.seeds=[0,1,2]               values of run.seed
  study.parallel=2                  runs at a time; default 1
  study.dir=DIR, or resume=auto     go on with a study, or with the newest of the recipe
  study.collapse_drop, cell_timeout_s, stop_timeout_s

  Each run is a `parity train` of its own, in outputs/studies/<recipe>/<time>/<mode>-<precision>-seed<k>;
  what is finished is not repeated. After each one study.html and study.json compare what
  there is; see docs/study.md.
""", _DRY_RUN, _CONFIG_DIR),
    CommandParser("""\
parity eval <recipe> checkpoint=<directory or none> [flags] [group=option ...] [key=value ...]

  checkpoint=...       a run directory (its newest good checkpoint, or with --best the best), a checkpoint,
                       a Hugging Face directory as parity export writes it, or none: the base model
  <recipe>             as of parity train; the config.yaml of a run is one too
  eval.samples=32      sampled responses per prompt: k of avg@k, pass@k and maj@k; one greedy beside them
  +eval.sets.NAME=FILE one more set, with the columns of data=file

  Starts the engines of the recipe, prints a table and writes eval.json and eval.jsonl to run.dir, by
  default outputs/evals/<recipe>/<time>.
""", _BEST, _CONFIG_DIR),
    CommandParser("""\
parity replay <run.dir> step=N [modes=NAME,...] [out=DIR] [bundle=FILE] [routes=true]
parity replay <bundle> [modes=NAME,...] [out=DIR] [bundle=FILE]

  step=N               a step that the run wrote down (dump.every=<steps>)
  modes=tis,mis        modes and presets to score it under; without it all of them
  out=DIR              where replay.json and replay.html go; without it <run.dir>/replay/step_<N>
  bundle=FILE          write the step as a bundle too: one file for other people
  routes=true          with the experts that the engine chose for each token of a mixture, which parity diagnose uses

  <bundle>: a step of any trainer in one safetensors file (docs/bundle.md): its mismatch, by probability and position,
  and every correction with its defaults. Files that NeMo-RL, prime-rl, slime and miles write are read too,
  also a directory with one file per rank; step=N is the rollout to take of a directory with several.

  One process on the CPU: no Ray, no engine. The row of the run's own correction is what it logged, to the
  last bit. See docs/replay.md.
"""),
    CommandParser("""\
parity diagnose <run.dir> [step=N] [tokens=1024] [device=cpu] [out=DIR]
parity diagnose <bundle> [model=DIR] [older=DIR,...] [key=value ...]

  Says why engine and trainer disagree: causes, their parts of K3 with 95 % intervals, what to change. Judges the
  steps that the run wrote down (dump.every) and whose weights are in a checkpoint, up to 4 together. Without any it
  takes one more step from the newest checkpoint, in a directory of its own.

  step=N               this step alone
  tokens=N             response tokens to judge, of all steps; each is scored a few hundred times
  out=DIR              where diagnosis.json and diagnosis.html go; without it <run.dir>/diagnosis

  <bundle>: a step of any trainer (docs/bundle.md) with token_ids, prompt_ids and prompt_lengths.

  model=DIR            the weights that sampled, as transformers loads them; without it only the numbers
                       are judged
  older=DIR,...        weights before, newest first: to recognise stale ones
  temperature=, trainer_dtype=, rollout_dtype=, quantization=
                       what the bundle does not say of itself

  See docs/diagnose.md.
"""),
    CommandParser("""\
parity report <run.dir> [<run.dir> ...] [-o FILE]

  <run.dir>            directory of a run, also of one that is still running

  Writes one HTML file that opens offline and prints its path. Several runs: one curve each, what differs in
  their configuration, and their headline numbers. See docs/reading_a_report.md.
""", _OUT),
    CommandParser("""\
parity port <file> [-o FILE]

  <file>               a script of verl, TRL, slime or miles: bash, Python or YAML. Nothing of it is executed.

  Prints a recipe that does the same, with a comment for what it cannot say. See docs/from_other_trainers.md.
""", _flag("-o", "--out", metavar="FILE", help="write the recipe to this new file")),
    CommandParser("""\
parity recipes

  List the recipes of the project: question, hardware, whether each was verified.
"""),
    CommandParser("""\
parity export <run.dir> <directory> [flags] [model.path=DIR]

  Write the newest good checkpoint of a run as a Hugging Face model with its tokenizer. Another one is named itself:
  <run.dir>/checkpoints/step_000020. <directory> must not exist. Of a LoRA run (policy.lora.rank) the adapter is
  added to the weights. model.path=DIR is where the model lies now that the run began with; no data are needed.
""", _BEST, _ADAPTER),
    CommandParser("""\
parity doctor

  Check this machine, a line per check. Exit code 0 if a run is possible, else 1.
"""),
)  # fmt: skip
PARSERS = {parser.prog.removeprefix("parity "): parser for parser in _ALL}
"""Command -> its parser."""
