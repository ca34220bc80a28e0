"""The README and docs/: links lead somewhere, keys, metrics and messages exist, lines and sentences are short."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from test_style import ROOT

from algorithms.config.loss import TAU_NEGATIVE, TAU_POSITIVE
from algorithms.config.presets import PRESETS

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MAX_COLUMNS = 120
MAX_README_WORDS = 1300
MAX_SENTENCE_WORDS = 35

CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


SPAN = re.compile(r"`([^`\n]+)`")
KEY_ROW = re.compile(r"^\| `([\w.]+)`", re.MULTILINE)
OPTION = re.compile(r"`([a-z_]+=[a-z0-9_]+)`")
OPEN_KEYS = ("rollout.engine_args.", "data.chat_template_kwargs.", "eval.sets.", "cluster.env.")
"""Keys that are mappings: their entries have any name."""
OTHERS_NAMES = ("from_other_trainers.md", "corrections.md", "rollouts.md")
"""Pages with names of other trainers, of an example, or with a letter in place of a number."""
QUOTING = ("troubleshooting.md", "first_gpu_run.md")
"""Pages that quote messages of the code."""
COMMANDS = ("parity", "pip", "make", "ray")
FILLED = "\0"
"""Stands for the part of a string that is filled in at run time."""


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


@cache
def source_strings() -> frozenset[str]:
    """Every string and name in the code of the packages, with FILLED in the place of each part that is not constant."""
    found = set()
    for path in (path for room in ("algorithms", "rollout", "trainer") for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.add(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else FILLED for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.Name):
                found.add(node.id)
    return frozenset(found)


@cache
def is_metric(name: str) -> bool:
    """True if the code has `name`, or a string that becomes `name` when names that the code has are filled in."""
    if name in source_strings() or name.isdigit() or not name:
        return True
    patterns = [text for text in source_strings() if FILLED in text and re.match(r"[a-z_]+/[\w/@+\0]*$", text)]
    matches = (re.fullmatch(re.escape(text).replace(re.escape(FILLED), r"([\w/@+]*)"), name) for text in patterns)
    return any(all(map(is_metric, found.groups())) for found in matches if found)


def missing_messages(span: str) -> list[str]:
    """Parts of a quoted message that no string of the code has; "..." stands for what is filled in."""
    parts = [part.strip() for part in span.split("...") if part.strip()]
    return [part for part in parts if not any(part in text for text in source_strings())]


def missing_names(text: str, *, messages: bool = False) -> Iterator[str]:
    """Keys, options and metrics in the code spans of a page that neither docs/keys.md nor the code has.

    With `messages` a span of several words that is no command is a message, which the code must have.
    """
    page = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    keys, options = set(KEY_ROW.findall(page)), {*OPTION.findall(page), *(f"correction={name}" for name in PRESETS)}
    sections, groups = {key.partition(".")[0] for key in keys}, {option.partition("=")[0] for option in options}
    for span in SPAN.findall(without_code(text)):
        words = span.split()
        if messages and len(words) > 1 and words[0] not in COMMANDS and not all("=" in word for word in words):
            yield from missing_messages(span)
            continue
        for word in words:
            name, _, value = word.lstrip("+").partition("=")
            if re.fullmatch(r"[a-z]+(/[\w+]+)+", name) and not (ROOT / name).exists():
                if not is_metric(name):
                    yield name
            elif re.fullmatch(r"[a-z_]+(\.\w+)+", name) and name.partition(".")[0] in sections:
                if (
                    name not in keys
                    and not name.startswith(OPEN_KEYS)
                    and not name.endswith((".md", ".py", ".json", ".jsonl"))
                ):
                    yield name
            elif name in groups and re.fullmatch(r"\w+", value) and word not in options:
                yield word


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OTHERS_NAMES], ids=lambda page: page.name)
def test_every_key_and_metric_of_a_page_exists(page: Path) -> None:
    is_quoting = page.name in QUOTING
    assert list(missing_names(page.read_text(encoding="utf-8"), messages=is_quoting)) == []


def test_names_that_do_not_exist_are_found() -> None:
    real = "`mismatch/k3` `mismatch/rs/veto_frac` `time/train_s` `mismatch/by_lag/1/k3` `optim.lr` `correction=mis`"
    real += " `+rollout.engine_args.x=1` `parity train <recipe> optim.lr=1` `phase ...: no answer from ...`"
    assert list(missing_names(real, messages=True)) == []
    wrong = ["mismatch/k4", "rollout/groups_dropped/too_new", "optim.rate", "correction=mise", "no reply came"]
    assert list(missing_names(" ".join(f"`{each}`" for each in wrong), messages=True)) == wrong
    assert list(missing_names("`parity train <recipe> optim.rate=1`")) == ["optim.rate"]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page outside tables; a code span is one word."""
    prose = "\n".join(line for line in without_code(text).splitlines() if not line.lstrip().startswith(("|", "#")))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose):
        plain = re.sub(r"\]\([^)]*\)", "]", SPAN.sub("X", " ".join(block.split())))
        yield from re.split(r"(?<=[.!?])\W*\s+(?![a-z])", plain)


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "measured"], ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    found = sentences(page.read_text(encoding="utf-8"))
    assert [sentence for sentence in found if len(sentence.split()) > MAX_SENTENCE_WORDS] == []


def test_sentences_are_told_apart() -> None:
    text = "# A title\n\nOne `x = 1` here. Two\n[there](b.md#c): three\n\n- four, e.g. `y`\n- Five.\n\n| a | table |\n"
    found = [sentence for sentence in sentences(text) if sentence]
    assert found == ["One X here.", "Two [there]: three", "- four, e.g.", "X", "- Five."]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= MAX_README_WORDS


def test_the_guide_of_losses_states_the_tau_of_the_code() -> None:
    text = (ROOT / "docs/losses.md").read_text(encoding="utf-8")
    assert f"tau of SAPO is {TAU_POSITIVE} where A > 0 and {TAU_NEGATIVE} where A ≤ 0" in text
