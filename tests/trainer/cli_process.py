"""The real command, for the tests of the command line."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from trainer.cli.commands import run

HEAVY = ("torch", "ray", "transformers", "sglang", "datasets", "wandb")
"""Packages whose import takes seconds."""

REFUSED_S = 6.0
"""Limit of `Outcome.cpu_s` for a refused command: twice the goal of 3 s, because the same work takes up to twice the
processor time while other processes use the other core."""

PROBE = """
import sys
from trainer.__main__ import main
sys.argv = ["parity", *sys.argv[1:]]
try:
    code = main()
finally:
    loaded = sorted(name for name in {names!r} if name in sys.modules)
    sys.stderr.write("LOADED " + ",".join(loaded) + "\\n")
sys.exit(code)
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str
    cpu_s: float
    """Seconds of processor time of its process: what the command costs, whatever else the machine does meanwhile."""
    loaded: tuple[str, ...]
    """Packages of `watched` that it imported; empty unless they were watched."""


def parity(*words: str, cwd: Path, watched: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Outcome:
    """Run `parity <words>`: in this process, where a start takes no second.

    With an environment of its own it is the installed console script, with `watched` imports the script's entry point.
    """
    if not watched and env is None:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(words)
        return Outcome(code=code, out=out.getvalue(), err=err.getvalue(), cpu_s=0.0, loaded=())
    script = str(Path(sys.executable).parent / "parity")
    command = [sys.executable, "-c", PROBE.format(names=watched)] if watched else [script]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*command, *words], cwd=cwd, env=os.environ | (env or {}), capture_output=True, text=True, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    err, _, loaded = done.stderr.partition("LOADED ")
    return Outcome(
        code=done.returncode,
        out=done.stdout,
        err=err,
        cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        loaded=tuple(name for name in loaded.strip().split(",") if name),
    )
