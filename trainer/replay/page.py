"""A Replay -> replay.html: one file without a script that opens offline. Every text in it is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import escape

from trainer.replay.compare import Matrix
from trainer.replay.results import COLUMNS, Replay, objective_of
from trainer.rundir.run_dir import write_whole

if TYPE_CHECKING:
    from trainer.replay.gradients import GradientReport

PAGE_FILE = "replay.html"
_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1440px; padding: 0 1rem; color: #1a1a1a }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } .wide { overflow-x: auto }
th, td { padding: .2rem .55rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left } td.text { text-align: left; white-space: normal }
.map td, .map th { padding: .15rem .3rem; font-size: 11px; border: 0 }
.map thead th { writing-mode: vertical-rl; transform: rotate(180deg); text-align: left }
code { font-size: 12px } p { max-width: 75ch }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #e6e6e6 } th, td { border-color: #333 }
  .map td { color: #111 } }
"""
_HOW_TO_READ = """
loss: what is minimised, with its denominators. weight: mean importance weight of the tokens, 0 where rejected; max: the
largest of a kept token. ESS: share of the tokens (seq: of the responses) that count; raw: of pi_old / mu before any
bound, applied: of the weights in the loss. kept: share of the response tokens in the loss. clip mass: share of the
weight that bounds took off. lr A>0, lr A<0: what is left of the learning rate, sum |w A| / sum |A|. K3: the mismatch,
nats. cosine, correlation: of the gradient of the loss by the log-prob of each token, with that of the run.
"""


def write_page(replay: Replay, gradients: GradientReport | None, directory: Path) -> Path:
    """Write replay.html as a whole; returns its path."""
    path = directory / PAGE_FILE
    write_whole(path, render(replay, gradients))
    return path


def render(replay: Replay, gradients: GradientReport | None) -> str:
    """The page as HTML."""
    title = f"replay of step {replay.dump.manifest.step}"
    names = [score.name for score in replay.scores]
    parts = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in replay.facts()),
        "<h2>Modes</h2>",
        _table(mode_rows(replay)),
        f"<p>{escape(_HOW_TO_READ)}</p>",
        *_refused(replay),
        *_gradients(gradients),
        "<h2>Cosine of the gradients by log-prob</h2>",
        _map(names, replay.cosine),
        "<h2>Correlation of the gradients by log-prob</h2>",
        _map(names, replay.correlation),
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
    """The table of modes as text, its titles first."""
    rows: list[tuple[str, ...]] = [("mode", *COLUMNS, "cosine", "correlation")]
    for place, score in enumerate(replay.scores):
        values = [score.metrics.get(key) for key in COLUMNS.values()]
        values += [replay.cosine[0][place], replay.correlation[0][place]]
        rows.append((score.name, *(shown(value) for value in values)))
    return rows


def gradient_rows(gradients: GradientReport) -> list[tuple[str, ...]]:
    """The table of true gradients as text, its titles first."""
    rows: list[tuple[str, ...]] = [("mode", "cosine", "+-", "norm", "variance / norm^2")]
    for place, name in enumerate(gradients.names):
        values = (
            gradients.cosines[0][place],
            gradients.cosine_spread[place],
            gradients.norms[place],
            gradients.relative_variance[place],
        )
        rows.append((name, *(shown(value) for value in values)))
    return rows


def gradient_notes(gradients: GradientReport) -> str:
    """What the table of gradients stands on."""
    mean, largest = gradients.logprob_gap
    kept = "" if gradients.is_exact else ", folded with random signs: inner products are good to 0.1 % of the lengths"
    return (
        f"Gradients of the parameters at {gradients.weights}{kept}. Its log-probs differ from those of the loss by "
        f"{mean:.1e} on average, {largest:.1e} at most. cosine: with the run's own correction; +- and variance: over "
        f"{gradients.num_draws} draws of {gradients.num_groups} groups with replacement."
    )


def shown(value: float | None) -> str:
    """A number in at most eight characters; a dash for none."""
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


def _map(names: Sequence[str], matrix: Matrix) -> str:
    """A square of coloured numbers: blue for alike, red for opposite."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = [
        f"<tr><td>{escape(name)}</td>{''.join(_coloured(value) for value in row)}</tr>"
        for name, row in zip(names, matrix, strict=True)
    ]
    body = "\n".join(lines)
    return (
        f'<div class="wide"><table class="map"><thead><tr><th></th>{head}</tr></thead><tbody>\n{body}\n'
        "</tbody></table></div>"
    )


def _coloured(value: float | None) -> str:
    if value is None:
        return "<td>-</td>"
    # What matters lies close to 1, so the colour follows the angle.
    strength = max(0.0, 1 - (1 - abs(value)) ** 0.5)
    hue = 210 if value >= 0 else 10
    return f'<td style="background:hsl({hue} 70% {100 - 40 * strength:.0f}%)">{value:.3f}</td>'


def _refused(replay: Replay) -> Iterator[str]:
    if replay.refused:
        yield "<h2>Refused</h2>"
        yield _table([("mode", "reason"), *((mode.name, mode.refusal) for mode in replay.refused)])


def _gradients(gradients: GradientReport | None) -> Iterator[str]:
    if gradients is not None:
        yield "<h2>True gradients</h2>"
        yield _table(gradient_rows(gradients))
        yield f"<p>{escape(gradient_notes(gradients))}</p>"
        yield _map(gradients.names, gradients.cosines)


def _objectives(replay: Replay) -> Iterator[tuple[str, str]]:
    for mode in replay.scored:
        if mode.config is not None:
            yield mode.name, objective_of(mode.config)
