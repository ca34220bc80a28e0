"""A run directory -> report.html: one file that opens offline, with charts, headline numbers and samples.

    data.py     files -> RunData, tiles, sample tables
    sections.py what is shown
    charts.py   RunData -> Bokeh figures
    assets/     page.html (Jinja2, everything escaped), page.css, page.js

What a model or a dataset wrote reaches the page only as escaped text. As a second line, the page carries a policy that
runs no script but the three of this report (by their hash) and opens no connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trainer.report.data import RunData, at, is_number, load_run, sample_tables, show, tiles

ASSETS = Path(__file__).resolve().parent / "assets"
_LONG_TEXT = 240
"""Characters of a prompt or response beyond which it is folded."""


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path; an older one is replaced as a whole.

    Raises FileNotFoundError if `run_dir` has no metrics.jsonl.
    """
    html = render(load_run(run_dir))
    path = run_dir / "report.html"
    partial = run_dir / ".report.html.partial"
    partial.write_text(html, encoding="utf-8", errors="replace")
    os.replace(partial, path)
    return path


def render(run: RunData) -> str:
    """The report as HTML."""
    # Bokeh takes a second to import: not at the start of a run.
    from bokeh.embed import components
    from bokeh.resources import Resources

    from trainer.report.charts import MAX_PLAIN_POINTS, draw

    drawing = draw(run)
    library = "\n".join(Resources(mode="inline", components=["bokeh"], log_level="error").js_raw)
    if drawing.figures:
        charts, holders = components(drawing.figures, wrap_script=False)
    else:
        charts, holders = "", {}
    scripts = [_script(text) for text in (library, charts, _asset("page.js"))]
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=at(run.config, "run", "recipe") or run.name,
        run=run,
        status=_status(run),
        facts=_facts(run),
        tiles=tiles(run),
        sections=drawing.sections,
        holders={name: Markup(holder) for name, holder in holders.items()},  # noqa: S704 - made by Bokeh from ids
        thinned=drawing.num_steps_drawn if drawing.num_steps_drawn < len(run.rows) else None,
        smoothed=len(run.rows) > MAX_PLAIN_POINTS,
        sample_tables=sample_tables(run),
        config_sections=_config_sections(run),
        environment_facts=_environment_facts(run),
        is_number=is_number,
        show=show,
        long_text=_LONG_TEXT,
        style=Markup(_asset("page.css")),  # noqa: S704 - our own file
        scripts=[Markup(text) for text in scripts],  # noqa: S704 - Bokeh, numbers and our own file
        policy=_policy(scripts),
    )


def _script(text: str) -> str:
    """Text that may stand in a script element: it cannot close the element or open a comment."""
    return re.sub(r"</(?=script)", r"<\\/", text, flags=re.IGNORECASE).replace("<!--", "<\\!--")


def _policy(scripts: list[str]) -> str:
    """Content-Security-Policy: these scripts, inline styles, nothing from anywhere else."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _status(run: RunData) -> dict[str, str]:
    """How the run stands: text and the class that colours it."""
    last = run.rows[-1]["step"] if run.rows else 0
    planned = at(run.config, "run", "num_steps")
    steps = f"{last} of {planned} steps" if planned else f"{last} steps"
    state = at(run.status, "status") or ("completed" if planned == last else "")
    return {"text": f"{state}, {steps}" if state else steps, "kind": state or "open"}


def _facts(run: RunData) -> list[str]:
    """The line under the title: what was trained, with what, when."""
    facts = [run.name, *(f"{name} {run.choices[name]}" for name in ("model", "data", "rollout") if name in run.choices)]
    if "correction" in run.choices:
        cap = at(run.config, "correction", "cap")
        bound = f", C = {cap:g}" if isinstance(cap, (int, float)) else ""
        facts.append(f"correction {run.choices['correction']}{bound}")
    if at(run.config, "advantage", "estimator"):
        facts.append(f"advantage {at(run.config, 'advantage', 'estimator')}")
    if at(run.environment, "started_at"):
        facts.append(f"started {str(at(run.environment, 'started_at'))[:16].replace('T', ' ')} UTC")
    return facts


def _config_sections(run: RunData) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(section, chosen group member, [(key, value)]) of the configuration."""
    sections = []
    for name, values in run.config.items():
        if name != "defaults" and isinstance(values, dict):
            choice = run.choices.get(name, "")
            sections.append((name, choice, [(str(key), _plain(value)) for key, value in values.items()]))
    return sections


def _environment_facts(run: RunData) -> list[tuple[str, str]]:
    """Machine, revision, command line and versions."""
    facts: list[tuple[str, str]] = []
    for key, value in run.environment.items():
        if key == "versions" and isinstance(value, dict):
            continue
        if key == "memory_bytes" and isinstance(value, (int, float)):
            facts.append(("memory", f"{value / 2**30:.1f} GiB"))
        elif key == "argv" and isinstance(value, list):
            facts.append(("command", " ".join(str(word) for word in value)))
        elif key == "git" and isinstance(value, dict):
            facts.append(("revision", f"{value['revision']}{' with local changes' if value['dirty'] else ''}"))
        elif value not in (None, [], ""):
            facts.append((key.replace("_", " "), _plain(value)))
    versions = at(run.environment, "versions")
    if isinstance(versions, dict):
        facts += [(str(name), str(version)) for name, version in versions.items() if version]
    return facts


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
