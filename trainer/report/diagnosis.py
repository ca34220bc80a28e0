"""What `parity diagnose` found, as a section of a page: the paragraph, and a bar per part of K3."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.report.data import RunData, is_number
from trainer.report.spec import Axis, Chart, ChartKind, Section, Series, Table

TITLE = "Where K3 comes from"
TABLE = "parts_of_k3"


def parts_section(answer: str, bars: Sequence[tuple[str, float]]) -> tuple[Section, Table]:
    """The section of an answer and its (cause, part of K3 in nats per token), and the table that its chart names."""
    places = np.arange(len(bars), dtype=np.float64)
    labels = tuple(label for label, _ in bars)
    chart = Chart(
        id="parts_of_k3",
        title="Parts of K3",
        series=(Series("k3", "K3", 0, table=TABLE),),
        kind=ChartKind.bars,
        x=Axis(
            column="place",
            label="cause",
            ticks=tuple(zip(places.tolist(), labels, strict=True)),
            between=(-0.6, len(bars) - 0.4),
        ),
        unit="nats per token",
        form="exponent",
        from_zero=all(value >= 0 for _, value in bars),
        wide=True,
    )
    table = Table(columns={"place": places, "k3": np.array([value for _, value in bars])}, labels=labels)
    return Section(title=TITLE, text=answer, charts=(chart,)), table


def diagnosis_section(run: RunData) -> tuple[Section | None, dict[str, Table]]:
    """The section of a run that was diagnosed, and its table by name; None for one that was not."""
    found, parts = run.diagnosis, run.diagnosis.get("parts")
    answer = found.get("answer")
    if not isinstance(answer, str) or not isinstance(parts, list):
        return None, {}
    bars = [(f"{part.get('name')} ({part.get('side')})", part["k3"]) for part in parts if is_number(part, "k3")]
    if is_number(found, "unexplained"):
        bars.append(("not explained", found["unexplained"]))
    section, table = parts_section(answer, bars)
    return section, {TABLE: table}
