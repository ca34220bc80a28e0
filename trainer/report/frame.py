"""The frame of every page: one HTML file that opens offline, with a policy against other content.

A page is a template that extends `assets/frame.html`. Jinja2 escapes all text. As a second defence, the page has a
policy that allows no connection, and only its own scripts (by hash): Bokeh, the charts and `assets/page.js`. A page
without charts has no script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trainer.report.data import is_number, show
from trainer.report.spec import Section, Table
from trainer.rundir.run_dir import write_whole

ASSETS = Path(__file__).resolve().parent / "assets"
TablePart = tuple[str, Sequence[Sequence[str]], int, str]
"""Heading, rows with the titles first, number of columns that are words, note."""


def render_page(
    template: str,
    *,
    sections: Sequence[Section],
    tables: Mapping[str, Table],
    context: Mapping[str, Any],
    templates: Path = ASSETS,
) -> str:
    """A page as HTML.

    Args:
        template: a file in `templates` (or in `assets/`), which extends frame.html; the macro `section_of(section)` of
            parts.html puts the charts of a section in place.
        sections: the charts.
        tables: the numbers, by the names that the series use.
        context: further values for the template; must contain `title`.
    """
    holders: dict[str, str] = {}
    scripts: list[str] = []
    if sections:
        # Imported here, not at the start of a run, because importing Bokeh takes a second.
        from bokeh.embed import components
        from bokeh.resources import Resources

        from trainer.report.charts import draw

        library = "\n".join(Resources(mode="inline", components=["bokeh"], log_level="error").js_raw)
        charts, holders = components(draw(sections, tables), wrap_script=False)
        scripts = [_script(text) for text in (library, charts, _asset("page.js"))]
    environment = Environment(
        loader=FileSystemLoader([templates, ASSETS]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "holders": {name: Markup(holder) for name, holder in holders.items()},  # noqa: S704 - made by Bokeh from ids
        "is_number": is_number,
        "show": show,
        "style": Markup(_asset("page.css")),  # noqa: S704 - our own file
        "scripts": [Markup(text) for text in scripts],  # noqa: S704 - Bokeh, numbers and our own file
        "policy": _policy(scripts),
    }
    return environment.get_template(template).render(sections=sections, **context)


def write_results(
    directory: Path,
    name: str,
    record: Mapping[str, object],
    *,
    title: str,
    facts: Sequence[str],
    parts: Sequence[TablePart],
    sections: Sequence[Section] = (),
    tables: Mapping[str, Table] = MappingProxyType({}),
) -> list[Path]:
    """Write `<name>.json` with `record`, and `<name>.html` with facts, charts and the tables that have rows, to
    `directory`, which is made, each atomically; returns their paths."""
    shown = [part for part in parts if len(part[1]) > 1]
    context = {"title": title, "facts": facts, "numbers": f"{name}.json beside this page", "parts_of_page": shown}
    page = render_page("tables.html", sections=sections, tables=tables, context=context)
    text = json.dumps(finite(record), indent=2, ensure_ascii=False, allow_nan=False)
    directory.mkdir(parents=True, exist_ok=True)
    result, html = directory / f"{name}.json", directory / f"{name}.html"
    write_whole(result, text + "\n")
    write_whole(html, page)
    return [result, html]


def finite(value: Any) -> Any:
    """The value as JSON has it: None for each number in it that is not finite."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _script(text: str) -> str:
    """Text for a script element, escaped so that it can neither close the element nor open a comment."""
    return re.sub(r"</(?=script)", r"<\\/", text, flags=re.IGNORECASE).replace("<!--", "<\\!--")


def _policy(scripts: list[str]) -> str:
    """Content-Security-Policy that allows these scripts and inline styles, and no other source."""
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
