"""A Replay -> replay.html: one file without a script that opens offline. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import escape

from trainer.replay.results import COLUMNS, Replay, objective_of
from trainer.rundir.run_dir import write_whole

PAGE_FILE = "replay.html"
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1440px; padding: 0 1rem; color: #1a1a1a }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } .wide { overflow-x: auto }
th, td { padding: .2rem .55rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left } td.text { text-align: left; white-space: normal }
code { font-size: 12px } p { max-width: 75ch }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #e6e6e6 } th, td { border-color: #333 } }
"""
_HOW_TO_READ = """
loss: what is minimised, with its denominators. weight: mean importance weight of the tokens, 0 where rejected; max: the
largest of a kept token. ESS: share of the tokens (seq: of the responses) that count; raw: of pi_old / mu before any
bound, applied: of the weights in the loss. kept: share of the response tokens in the loss. clip mass: share of the
weight that bounds took off. lr A>0, lr A<0: what is left of the learning rate, sum |w A| / sum |A|. K3: the mismatch,
nats.
"""


def write_page(replay: Replay, directory: Path) -> Path:
    """Write replay.html atomically; returns its path."""
    path = directory / PAGE_FILE
    write_whole(path, render(replay))
    return path


def render(replay: Replay) -> str:
    """The page as HTML."""
    title = f"replay of step {replay.dump.description.step}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in replay.facts()),
        "<h2>Modes</h2>",
        _table(mode_rows(replay)),
        f"<p>{escape(_HOW_TO_READ)}</p>",
        *_refused(replay),
        "<h2>What each mode minimises</h2>",
        _table([("mode", "objective"), *_objectives(replay)]),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def mode_rows(replay: Replay) -> list[tuple[str, ...]]:
    """The table of modes as text, titles first."""
    rows: list[tuple[str, ...]] = [("mode", *COLUMNS)]
    for score in replay.scores:
        rows.append((score.name, *(shown(score.metrics.get(key)) for key in COLUMNS.values())))
    return rows


def shown(value: float | None) -> str:
    """A number in at most eight characters; a dash for None."""
    if value is None:
        return "-"
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e5):
        return f"{value:.2e}"
    return f"{value:.4f}" if size < 10 else f"{value:.2f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    titles, *body = rows
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    lines = "\n".join(f"<tr>{''.join(_cell(text) for text in row)}</tr>" for row in body)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{lines}\n</tbody></table></div>'


def _cell(text: str) -> str:
    return f'<td class="text">{escape(text)}</td>' if " " in text else f"<td>{escape(text)}</td>"


def _refused(replay: Replay) -> Iterator[str]:
    if replay.refused:
        yield "<h2>Refused</h2>"
        yield _table([("mode", "reason"), *((mode.name, mode.refusal) for mode in replay.refused)])


def _objectives(replay: Replay) -> Iterator[tuple[str, str]]:
    for mode in replay.scored:
        if mode.config is not None:
            yield mode.name, objective_of(mode.config)
