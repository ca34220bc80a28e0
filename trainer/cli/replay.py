"""`parity replay <run.dir> step=N [key=value ...]`, or `parity replay <bundle>`: a step under every correction.

In place of a bundle stands a file of another trainer too, or a directory with the files of its ranks.

All problems are reported together before torch is loaded. Called by `commands.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from algorithms.config import NOT_SET, Problem
from trainer.cli.step_source import StepWords, read_words, show, with_config
from trainer.cli.tables import rows_text
from trainer.ending.exit_codes import report
from trainer.replay.modes import all_names, name_problems, of_bundle
from trainer.rundir.dump import open_dump, way_to_a_dump
from trainer.rundir.run_dir import unusable_problem
from trainer.text.plain import size

if TYPE_CHECKING:
    from trainer.replay.results import Replay

NAME = "parity replay"
OUTPUT = "replay"
"""Directory in run.dir for the results, unless out= names another directory."""
OF_FILE = ("modes", "out", "bundle")


def run_replay(words: Sequence[str]) -> int:
    """Run `parity replay <words>`; return the exit code."""
    found = read_words(words, command="replay", of_run=("step", *OF_FILE, "routes"), of_file=OF_FILE)
    source, given, problems = found.source, found.given, found.problems
    if source is not None and found.is_run and "step" not in given:
        remedy = f"Write step=N. {way_to_a_dump(source)}"
        problems.append(Problem(key="step", rule="is missing", value=NOT_SET, remedy=remedy))
    every = all_names() if found.is_run else of_bundle()
    names = [name for name in given.get("modes", "").strip("[]").split(",") if name]
    problems += name_problems(names, known=every)
    bundle = Path(given["bundle"]) if given.get("bundle") else None
    if given.get("routes", "true") not in ("true", "false"):
        problems.append(Problem(key="routes", rule="must be true or false", value=given["routes"]))
    if "routes" in given and bundle is None:
        problems.append(Problem(key="bundle", rule="is missing", value=NOT_SET, remedy="routes= needs bundle=FILE."))
    if bundle is not None and (unusable := unusable_problem("bundle", bundle.parent)) is not None:
        problems.append(unusable)
    if source is None or problems or not (out := found.out(source, OUTPUT, f"step_{found.step or 0:06d}")):
        return report(problems, command=NAME)
    return show(lambda: _replayed(found, source, names or every, out, bundle), out, command=f"{NAME} {source}")


def _replayed(
    found: StepWords, source: Path, modes: Sequence[str], out: Path, bundle: Path | None
) -> tuple[str, list[Path]]:
    # Imported late, because these lines import torch.
    from trainer.replay.bundle import route_bytes, routes_note, write_bundle
    from trainer.replay.bundle_step import bundle_of
    from trainer.replay.peers.recognise import read_any
    from trainer.replay.results import replay_bundle, replay_step

    if found.is_run:
        assert found.step is not None
        dump, config = with_config(open_dump(source, found.step))
        replay: Replay = replay_step(dump, config, modes, run_dir=source)
    else:
        read = read_any(source, step=found.step)
        replay = replay_bundle(read, modes)
    text = render_replay(replay)
    if bundle is not None:
        if found.is_run:
            wanted = found.given.get("routes") == "true"
            read = bundle_of(replay.step, dump.description, config, with_routes=wanted)
            if wanted:
                text += f"Routes take {size(route_bytes(read))} of {bundle}.\n"
            elif (note := routes_note(read)) is not None:
                text += f"{note}.\n"
        bundle.parent.mkdir(parents=True, exist_ok=True)
        write_bundle(read, bundle)
    return text, [*replay.write(out), *([] if bundle is None else [bundle])]


def render_replay(replay: Replay) -> str:
    """Text with facts about the step, the mismatch of a bundle, one row per mode, and the refused modes."""
    facts = "\n".join(replay.facts())
    mismatch = "".join(f"{rows_text(rows)}\n" for _, rows, *_ in replay.measured()[:1])
    refused = (f"{mode.name} is refused: {mode.refusal}\n" for mode in replay.refused)
    return f"{facts}\n\n{mismatch}{rows_text(replay.mode_rows())}{''.join(refused)}"
