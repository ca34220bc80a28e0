"""A diagnosis -> one paragraph, one table, one picture: for the command line, diagnosis.json and diagnosis.html."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from trainer.diagnose.diagnosis import Diagnosis
from trainer.diagnose.ladder import FLOAT32_NOISE
from trainer.diagnose.shares import Share
from trainer.replay.results import shown
from trainer.report.bins import PARTS_TABLE, parts_section
from trainer.report.frame import write_results

NAME = "diagnosis"
"""Of the files diagnosis.json and diagnosis.html."""
FORMAT = 1
"""Version of diagnosis.json."""
UNEXPLAINED = "not explained"
LEAST_NAMED = 0.05
"""Share of K3 from which a further part is in the paragraph."""
MANY_TENSORS = 4
"""Causes that look alike are named up to so many."""


def answer(diagnosis: Diagnosis) -> str:
    """The paragraph."""
    if diagnosis.k3 == 0:
        return "K3 is 0: engine and trainer agree on every token."
    whole = f"K3 is {shown(diagnosis.k3)} nats per token."
    if _agrees(diagnosis):
        return f"{whole} Engine and trainer agree to the rounding of float32: there is nothing to change."
    first = next(iter(diagnosis.faults or diagnosis.parts), None)
    if first is None or max(part.share for part in diagnosis.parts) < LEAST_NAMED < diagnosis.unexplained.share:
        return f"{whole} No cause that was tried explains it."
    share = _share(first)
    verdict = (
        f"{share} of it is there because the {first.side} {first.what}. Change: {first.remedy}."
        if first.is_fault
        else f"{share} of it is as configured: the {first.side} {first.what}. Less of it: {first.remedy}."
    )
    others = [part for part in diagnosis.parts if part is not first and part.share > LEAST_NAMED]
    also = "".join(f" The {part.side} also {part.what}: {_share(part)}." for part in others)
    rest = ""
    if diagnosis.unexplained.share > LEAST_NAMED:
        rest = f" {_share(diagnosis.unexplained)} is rounding that no replay shows, or not explained."
    return f"{whole} {verdict}{also}{rest}"


def facts(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the paragraph, and what is to be known beside it, a line each."""
    yield answer(diagnosis)
    evidence = diagnosis.evidence
    tokens = int(evidence.mask.sum())
    if tokens < evidence.num_tokens:
        yield (
            f"judged by {tokens:,} of {evidence.num_tokens:,} tokens, in {len(evidence.lengths):,} responses; K3 "
            f"of all is {shown(evidence.k3)}"
        )
    for part in diagnosis.parts:
        if part.alike:
            more = len(part.alike) - MANY_TENSORS
            names = "; ".join(part.alike[:MANY_TENSORS]) + (f"; {more} more" if more > 0 else "")
            yield f"{part.name} cannot be told from: {names}"
    if any(part.share < -LEAST_NAMED for part in diagnosis.parts):
        yield "a share below 0 is that of a cause that works against another one: without it K3 would be larger"
    if (routing := diagnosis.routing) is not None:
        did = "Routing replay takes" if routing.is_replayed else "policy.routing=replay would take"
        yield (
            f"routing: K3 is {shown(routing.k3_live)} with the trainer's own experts and {shown(routing.k3_replayed)} "
            f"with the engine's, {routing.tokens_rerouted:.1%} of the tokens get others. {did} {routing.share:.0%} away"
        )
    yield from diagnosis.notes


def part_rows(diagnosis: Diagnosis) -> list[tuple[str, ...]]:
    """The table: the parts of K3, titles first."""
    rows: list[tuple[str, ...]] = [("cause", "side", "what it does", "change", "K3", "share")]
    for part in diagnosis.parts:
        rows.append((part.name, part.side, part.what, part.remedy, shown(part.k3), _share(part)))
    rest = diagnosis.unexplained
    if _agrees(diagnosis):
        rows.append(("rounding", "", "float32 arithmetic in another order", "nothing", shown(rest.k3), "100%"))
    else:
        what = "rounding that no replay shows, or a cause that was not tried"
        rows.append((UNEXPLAINED, "", what, "", shown(rest.k3), _share(rest)))
    rows.append(("all", "", "", "", shown(diagnosis.k3), "100%"))
    if (routing := diagnosis.routing) is not None and routing.is_replayed:
        what = f"would choose other experts for {routing.tokens_rerouted:.1%} of the tokens"
        change = f"nothing: replay takes it away, of a K3 of {shown(routing.k3_live)}"
        rows.append(("routing", "trainer", what, change, shown(routing.k3), f"(-{routing.share:.0%})"))
    return rows


def record(diagnosis: Diagnosis) -> dict[str, object]:
    """The diagnosis as JSON values."""
    routing = diagnosis.routing
    return {
        "format": FORMAT,
        "answer": answer(diagnosis),
        "k3": diagnosis.k3,
        "k3_of_all_tokens": diagnosis.evidence.k3,
        "num_tokens": int(diagnosis.evidence.mask.sum()),
        "parts": [asdict(part) for part in diagnosis.parts],
        "unexplained": diagnosis.unexplained.k3,
        "unexplained_share": asdict(diagnosis.unexplained),
        "routing": routing and {**asdict(routing), "k3": routing.k3, "share": routing.share},
        "notes": list(diagnosis.notes),
    }


def write_diagnosis(diagnosis: Diagnosis, directory: Path, *, title: str) -> list[Path]:
    """Write diagnosis.json and diagnosis.html to `directory`; returns their paths."""
    bars = [(f"{part.name} ({part.side})", part.k3) for part in diagnosis.parts]
    section, table = parts_section(answer(diagnosis), [*bars, (UNEXPLAINED, diagnosis.unexplained.k3)])
    return write_results(
        directory,
        NAME,
        record(diagnosis),
        title=title,
        facts=list(facts(diagnosis)),
        parts=[("Parts of K3", part_rows(diagnosis), 4, "")],
        sections=[section],
        tables={PARTS_TABLE: table},
    )


def _agrees(diagnosis: Diagnosis) -> bool:
    """True if the difference is that of correct float32 arithmetic."""
    return not diagnosis.parts and diagnosis.k3 <= FLOAT32_NOISE


def _share(share: Share) -> str:
    """The share of K3, and its interval if it has one."""
    if not math.isfinite(share.share):
        return "-"
    text = f"{round(100 * share.share)}%"
    return text if math.isnan(share.low) else f"{text} ({round(100 * share.low)} to {round(100 * share.high)}%)"
