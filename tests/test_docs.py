"""The README and docs/: every relative link leads somewhere, lines are short, the README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_style import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_COLUMNS = 120
MAX_README_WORDS = 1300

CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def without_code(text: str) -> str:
    return CODE.sub("", text)


def anchors(text: str) -> set[str]:
    """The fragments of the headings of a page, as GitHub forms them."""
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(without_code(text)))
    return {title.strip().replace(" ", "-") for title in kept}


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        is_there = target.exists() and target.is_relative_to(ROOT)
        if not is_there or (fragment and fragment not in anchors(target.read_text(encoding="utf-8"))):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_relative_link_is_dead(page: Path) -> None:
    assert not dead_links(page)


def test_a_dead_link_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "b.md").write_text("# What `x=1` does, here\n\n```\n# no heading\n[none](gone.md)\n```\n")
    page = tmp_path / "a.md"
    page.write_text("# A\n[b](b.md) [c](c.md) [in b](b.md#what-x1-does-here) [no](b.md#no-heading) [a](#a) [z](#z)\n")
    assert dead_links(page) == ["c.md", "b.md#no-heading", "#z"]
    assert dead_links(tmp_path / "b.md") == []


def test_the_index_names_every_page() -> None:
    for index in (ROOT / "docs" / "README.md", ROOT / "docs" / "measured" / "README.md"):
        named = {link.partition("#")[0] for link in LINK.findall(index.read_text(encoding="utf-8"))}
        pages = {path.name for path in index.parent.glob("*.md")} - {"README.md"}
        assert pages <= named, pages - named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_are_short(page: Path) -> None:
    """Rows of tables are left out: they cannot be wrapped."""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    long = [number for number, line in lines if len(line) > MAX_COLUMNS and not line.lstrip().startswith("|")]
    assert not long, f"lines of more than {MAX_COLUMNS} columns"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= MAX_README_WORDS
