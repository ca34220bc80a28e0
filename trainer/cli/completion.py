"""Tab completion: beginning of a command line -> possible next words.

After `complete -o default -o nospace -C "parity -sc" parity` the shell calls `parity -sc parity <word> <word before>`
at every TAB, with the line in $COMP_LINE.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from algorithms.config.rules import describe
from trainer.cli.parsers import COMPLETION, PARSERS
from trainer.compose.catalog import recipe_files
from trainer.config.paths import recipe_dir
from trainer.config.train import GROUPS, PRESETS, TrainConfig
from trainer.ending.exit_codes import DONE, refuse
from trainer.text.plain import to_stdout

LINE = "COMP_LINE"
INSTALL = f'complete -o default -o nospace -C "parity {COMPLETION}" parity'


def complete(asked: Sequence[str]) -> int:
    """Write the words that may stand at the end of $COMP_LINE, a line each; `asked`: the arguments of the shell."""
    line = os.environ.get(LINE)
    if line is None:
        return refuse("parity", COMPLETION, "is called by the shell", " ".join(asked), f"Install it: {INSTALL}")
    typed = line.split()[1:] + ([""] if line[-1:].isspace() else [])
    last = typed[-1] if typed else ""
    # A shell that breaks words at "=" asks for the part behind it. A key is offered up to its next dot.
    part = asked[1] if len(asked) > 1 and last.endswith(asked[1]) else last
    found = {word[: word.find(".", len(last)) + 1] or word for word in _words(typed) if word.startswith(last)}
    to_stdout("".join(f"{word[len(last) - len(part) :]}\n" for word in sorted(found)))
    return DONE


def _words(typed: Sequence[str]) -> Iterator[str]:
    """The words that may stand where the last of `typed` stands."""
    command = typed[0] if typed else ""
    if len(typed) < 2 or command not in PARSERS:
        yield from PARSERS if len(typed) < 2 else ()
    elif typed[-1].startswith("-"):
        yield from PARSERS[command].flags
    elif command in ("train", "study", "eval") and len(typed) == 2:
        yield from recipe_files(recipe_dir())
    elif command in ("train", "study", "eval", "resume"):
        for group, options in GROUPS.items():
            yield from (f"{group}={name}" for name in (*options, *PRESETS.get(group, ())))
            for kind in options.values():
                yield from (f"{each.key}=" for each in describe(kind, prefix=f"{group}."))
        yield from (f"{each.key}=" for each in describe(TrainConfig))
        if command == "study":
            from trainer.study.config import StudyConfig

            yield from (f"{each.key}=" for each in describe(StudyConfig, prefix="study."))
        if command == "eval":
            yield "checkpoint="
