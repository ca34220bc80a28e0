"""The frame of every page: one HTML file that opens offline, with Bokeh inside and a policy that allows nothing else.

A page is a template that extends `assets/frame.html`. Whatever text it shows is escaped by Jinja2. As a second line,
the page carries a policy that runs no script but its own three (by their hash) and opens no connection.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trainer.report.data import is_number, show
from trainer.report.spec import Section, Table

ASSETS = Path(__file__).resolve().parent / "assets"


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
        template: a file in `templates` (or in `assets/`), which extends frame.html; its macro `section_of(section)`
            puts the charts of a section in place.
        sections: what is drawn.
        tables: the numbers, by the names that the series use.
        context: what the template shows besides; `title` must be there.
    """
    # Bokeh takes a second to import: not at the start of a run.
    from bokeh.embed import components
    from bokeh.resources import Resources

    from trainer.report.charts import draw

    figures = draw(sections, tables)
    library = "\n".join(Resources(mode="inline", components=["bokeh"], log_level="error").js_raw)
    charts, holders = components(figures, wrap_script=False) if figures else ("", {})
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


def write_page(html: str, path: Path) -> Path:
    """Write a page; an older one is replaced as a whole. Returns `path`."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(html, encoding="utf-8", errors="replace")
    os.replace(partial, path)
    return path


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
