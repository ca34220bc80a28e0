"""`parity port <file>`: a script of another trainer -> a recipe. Called by `commands.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from algorithms.config import NOT_SET
from algorithms.config.home import from_home
from trainer.cli.parsers import PARSERS
from trainer.compose.peer_script import read_script
from trainer.compose.port import peer_of, ported
from trainer.ending.exit_codes import DONE, FAILED, refuse, report
from trainer.text.plain import command_line, to_stderr, to_stdout

NAME = "parity port"


def run_port(words: Sequence[str]) -> int:
    """Run `parity port <words>`; return the exit code."""
    parsed, problems = PARSERS["port"].read(words)
    if problems:
        return report(problems, command=NAME)
    if len(parsed.words) != 1:
        return refuse(NAME, "file", "must be one script", " ".join(parsed.words) or NOT_SET)
    path = Path(from_home(parsed.words[0], key="file"))
    try:
        script = read_script(path)
    except (OSError, ValueError, SyntaxError, RecursionError) as error:
        return refuse(NAME, "file", f"cannot be read ({str(error).splitlines()[0]})", str(path))
    peer = peer_of(script.settings)
    known = [key for key in script.settings if peer.row(key.split("."))]
    if not known:
        remedy = "Name the bash, Python or YAML file that holds the settings of verl, TRL, slime or miles."
        return refuse(NAME, "file", "must hold settings of another trainer", str(path), remedy)
    recipe, problems = ported(script, peer, source=path.name)
    for problem in problems:
        to_stderr(f"{NAME}: parity train refuses this recipe: {problem}\n")
    code = FAILED if problems else DONE
    if parsed.out is None:
        to_stdout(recipe)
        return code
    out = Path(from_home(parsed.out, key="--out"))
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(recipe)
    except OSError as error:
        return refuse(NAME, "--out", f"cannot be written ({error.strerror})", str(out), "Name a new file.")
    check = command_line("parity", "train", out, "--dry-run")
    to_stderr(f"{len(script.settings)} settings of {peer.about}. Check it: {check}\n")
    return code
