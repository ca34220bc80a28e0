"""YAML of strangers: plain values, or one sentence."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from cli_process import HEAVY, parity

from trainer.compose.compose import resolve
from trainer.rundir.provenance import config_document
from trainer.text.yaml_text import load_yaml

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def bomb(*, width: int = 9, lines: int = 12) -> str:
    """Some lines, each a list of aliases to the line before."""
    inner = (f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, lines))
    return "\n".join(["a0: &a0 [x]", *inner, ""])


def test_ordinary_yaml_is_read_as_it_is() -> None:
    text = "a: &x [1, 2.5, null]\nb: *x\nc: {d: 2026-01-02, e: '\\u2028'}\n"
    assert load_yaml(text) == yaml.safe_load(text)
    assert load_yaml("") is None
    assert load_yaml(bomb(lines=4)) == yaml.safe_load(bomb(lines=4))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (bomb(), "its aliases stand for"),
        ("a: &a [*a]", "contains itself"),
        ("[" * 150 + "]" * 150, "nested more than 100 levels deep"),
        ("[" * 100_000, "is not YAML that can be read: RecursionError"),
        ("a: [", r"not YAML that can be read, line 1, column 5: .* \(while parsing a flow node, line 1, column 5\)"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("a: !!bool maybe", "KeyError"),
        ("a: !!timestamp x", "is not YAML that can be read"),
    ],
)
def test_everything_else_is_one_sentence(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        load_yaml(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_what_parity_writes_can_be_read(recipe: Path) -> None:
    [run] = resolve(recipe, ["run.dir=x"], own_dir=None, multirun=False).runs
    if run.config is not None:
        assert load_yaml(config_document(run.config))["run"]["recipe"] == recipe.stem


def test_a_recipe_with_a_bomb_is_refused(tmp_path: Path) -> None:
    (tmp_path / "evil.yaml").write_text("defaults: [/train, _self_]\n" + bomb())
    started = time.monotonic()
    outcome = parity("train", "./evil.yaml", "--dry-run", cwd=tmp_path, watched=HEAVY)
    assert (outcome.code, outcome.loaded) == (2, ()) and time.monotonic() - started < 50
    assert "evil.yaml" in outcome.err and "its aliases stand for" in outcome.err
