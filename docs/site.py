"""Hook of mkdocs: files of the repository to which pages link become files of the site, in `source/`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(r"\]\((?P<up>(?:\.\./)+)(?P<path>[^)#]+)(?P<anchor>#[^)]*)?\)")
"""A link that begins above its page."""


def _linked(markdown: str, page: Path) -> dict[str, str]:
    """Link as it is written -> path in the repository, of the links to files that are not in docs/."""
    found = {}
    for link in OUTSIDE.finditer(markdown):
        target = (page.parent / (link["up"] + link["path"])).resolve()
        if target.is_relative_to(ROOT) and not target.is_relative_to(ROOT / "docs"):
            found[link["up"] + link["path"]] = target.relative_to(ROOT).as_posix()
    return found


def on_files(files: Files, *, config: Any) -> Files:
    """Add what the pages link to; a link to nothing is left for the check of mkdocs."""
    for file in files.documentation_pages():
        page = Path(config.docs_dir) / file.src_uri
        for path in _linked(page.read_text(encoding="utf-8"), page).values():
            name = f"source/{path}.txt"
            if (ROOT / path).is_file() and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Let these links lead to `source/`."""
    at = Path(config.docs_dir) / page.file.src_uri
    up = "../" * page.file.src_uri.count("/")
    for written, path in _linked(markdown, at).items():
        if files.get_file_from_path(f"source/{path}.txt") is not None:
            markdown = markdown.replace(f"]({written}", f"]({up}source/{path}.txt")
    return markdown
