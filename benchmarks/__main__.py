"""Run every benchmark with its default arguments: `make bench`, or `python benchmarks [NAME ...]`.

Each script of this directory writes its table to outputs/bench/<script>.md, headed by date, machine and revision.
What a script says meanwhile is in outputs/bench/<script>.log. After one that fails the others still run, and the exit
status is 1. Repeating replaces the tables. Names run only those scripts.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent / "outputs" / "bench"
GUARD = 'if __name__ == "__main__":'
BEAT_S = 30.0
"""A line says that a script still runs."""


def scripts() -> list[Path]:
    """Every file here that can be run, by name: the others are parts of one."""
    found = (path for path in HERE.glob("*.py") if path.name != "__main__.py")
    return sorted(path for path in found if GUARD in path.read_text(encoding="utf-8"))


def run(script: Path, *, timeout_s: float) -> bool:
    """Run one script; True if it ended well."""
    started = time.perf_counter()
    table, log = OUTPUT / f"{script.stem}.md", OUTPUT / f"{script.stem}.log"
    partial = table.with_suffix(".unfinished")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    with partial.open("w", encoding="utf-8") as out, log.open("w", encoding="utf-8") as err:
        out.write(heading(script))
        out.flush()
        process = subprocess.Popen([sys.executable, str(script)], stdout=out, stderr=err, env=environment)  # noqa: S603
        try:
            status = wait(process, script, timeout_s=timeout_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    seconds = time.perf_counter() - started
    if status == 0:
        partial.replace(table)
        say(f"{script.name}: done in {seconds:.0f} s, {table.relative_to(HERE.parent)}")
        return True
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
    reason = f"no end within {timeout_s:.0f} s" if status is None else f"exit status {status}"
    say(
        "\n".join([f"{script.name}: FAILED after {seconds:.0f} s, {reason}; see {log.relative_to(HERE.parent)}", *last])
    )
    return False


def wait(process: subprocess.Popen[bytes], script: Path, *, timeout_s: float) -> int | None:
    """The exit status; None if it did not end in time."""
    for beat in range(1, int(timeout_s / BEAT_S) + 2):
        try:
            return process.wait(timeout=min(BEAT_S, timeout_s))
        except subprocess.TimeoutExpired:
            say(f"{script.name}: running, {beat * BEAT_S:.0f} s")
    return None


def heading(script: Path) -> str:
    """What stands above a table."""
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return (
        f"<!-- benchmarks/{script.name}, {datetime.now(UTC):%Y-%m-%d}, revision {revision or 'unknown'}, "
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()} -->\n"
    )


def say(text: str) -> None:
    sys.stdout.write(f"[bench] {text}\n")
    sys.stdout.flush()


def main() -> int:
    """Run them one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {script.stem: script for script in scripts()}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all without")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds that one script may take")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    chosen = [known[name] for name in arguments.names] or list(known.values())
    failed = []
    for number, script in enumerate(chosen, start=1):
        say(f"{number} of {len(chosen)}: {script.name}")
        if not run(script, timeout_s=arguments.timeout):
            failed.append(script.name)
    say(f"{len(chosen) - len(failed)} of {len(chosen)} done" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
