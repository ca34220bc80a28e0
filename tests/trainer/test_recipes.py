"""The recipes and configs that come with the project: complete headers, nothing said twice, plans, in the wheel."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from algorithms.config import TISConfig
from rollout.config import Quantization
from trainer.cli.parsers import PARSERS
from trainer.cli.plan import render_plan
from trainer.compose.catalog import RecipeCard, find_recipe, read_card, recipe_files
from trainer.compose.compose import ComposedRun, resolve
from trainer.config.paths import config_dir, recipe_dir
from trainer.config.train import TrainConfig
from trainer.config.training import HFModelConfig
from trainer.limits.estimate import batch_shape
from trainer.limits.machine import Machine

ROOT = Path(__file__).parents[2]
RECIPES = recipe_files(recipe_dir())
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_LINES = 40
OWN_DATA = ("arithmetic", "smollm2", "collapse")
"""How the names of recipes begin that make their own data."""
MACHINE = Machine(cpus=2, gpus=0, memory=16 * 2**30)


def leaves(content: DictConfig, above: str = "") -> Iterator[str]:
    """Dotted key of everything that a file sets, but for Hydra's part and the defaults list."""
    for key in content:
        name = f"{above}{key}"
        if name in ("defaults", "hydra"):
            continue
        value = content._get_node(key)
        if isinstance(value, DictConfig):
            yield from leaves(value, f"{name}.")
        else:
            yield name


def test_there_are_recipes_and_only_yaml() -> None:
    assert {
        "arithmetic_grpo",
        "arithmetic_dapo",
        "arithmetic_ppo",
        "gsm8k_grpo_qwen2.5_0.5b",
        "gsm8k_ppo_qwen2.5_0.5b",
    } <= set(RECIPES)
    for directory in (recipe_dir(), config_dir()):
        assert {path.suffix for path in directory.rglob("*") if path.is_file()} == {".yaml"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short_and_states_what_it_is_for(name: str) -> None:
    lines = RECIPES[name].read_text().splitlines()
    assert len(lines) <= MAX_LINES
    header = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    fields = [found[1] for line in header if (found := re.match(r"# (Question|Hardware|Expected|Verified): \S", line))]
    assert fields == ["Question", "Hardware", "Expected", "Verified"]
    card = read_card(RECIPES[name])
    is_ours = name.startswith("arithmetic")
    left_out = ("name", "source") if is_ours else ("name",)
    stated = [getattr(card, field) for field in RecipeCard.__dataclass_fields__ if field not in left_out]
    assert "not stated" not in stated
    assert all(len(field) >= 10 for field in stated)
    assert card.question.endswith("?")
    assert card.verified.startswith(("no, ", "yes, ")), "yes and where, or no and why not"


def data_words(name: str, rows: Path) -> list[str]:
    """The recipe over the file `rows`, unless it makes its own data."""
    return [f"data.{part}_path={rows}" for part in ("train", "eval") if not name.startswith(OWN_DATA)]


@functools.cache
def composed_run(name: str, rows: Path) -> ComposedRun:
    """No model is looked for."""
    resolution = resolve(RECIPES[name], data_words(name, rows), own_dir=None, multirun=False)
    assert [str(problem) for problem in resolution.problems] == []
    return resolution.runs[0]


def composed(name: str, rows: Path) -> TrainConfig:
    config = composed_run(name, rows).config
    assert config is not None
    return config


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of data for the recipes that need one."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    return path


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_restates_nothing_of_what_it_starts_from(name: str, rows: Path, tmp_path: Path) -> None:
    content = OmegaConf.load(RECIPES[name])
    assert isinstance(content, DictConfig)
    # arithmetic_async may name the lag that it asks about.
    empty = {"defaults": [entry for entry in content.defaults if "override /schedule" not in entry]}
    OmegaConf.save(empty, tmp_path / "empty.yaml")
    words = [*data_words(name, rows), *(["model.path=other"] if "path" in content.get("model", {}) else [])]
    [plain] = resolve(tmp_path / "empty.yaml", words, own_dir=None, multirun=False).runs
    own = composed_run(name, rows).tree
    assert own is not None and plain.tree is not None
    for key in leaves(content):
        assert OmegaConf.select(own, key) != OmegaConf.select(plain.tree, key), f"{key} stands there already"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes_and_has_a_plan(name: str, rows: Path) -> None:
    config = composed(name, rows)
    text = render_plan(config, machine=MACHINE, output_dir=Path("out"))
    assert f"{config.batch.samples_per_step} samples per step" in text
    if isinstance(config.model, HFModelConfig):
        assert f"memory      unknown: {config.model.path} is not a local directory" in text
        assert "its number of parameters is missing" in text
        assert "parameters unknown" in text
    else:
        assert "each of " in text.split("memory ")[1].splitlines()[0]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_answer_its_question(name: str, rows: Path) -> None:
    config = composed(name, rows)
    assert config.eval.every > 0
    assert batch_shape(config).tokens_per_sample <= config.batch.max_tokens_per_microbatch
    if config.rollout.quantization is not Quantization.none and name != "collapse":  # which asks what happens then
        assert isinstance(config.correction, TISConfig), "an engine of 8 bits samples from another policy"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_no_key_without_effect(name: str, rows: Path) -> None:
    assert not [note for note in composed(name, rows).notes() if "without effect" in note or "not met" in note]


def test_the_docs_list_every_recipe_and_whether_it_was_verified() -> None:
    rows = {}
    for line in (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| [`") and "](../recipes/" in line:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows[cells[0]] = cells[-1]
    verified = {name: read_card(path).verified.split(",")[0] for name, path in RECIPES.items()}
    assert rows == {f"[`{name}`](../recipes/{name}.yaml)": said for name, said in verified.items()}


def test_the_main_config_sets_no_value() -> None:
    content = OmegaConf.load(config_dir() / "train.yaml")
    assert isinstance(content, DictConfig)
    assert list(leaves(content)) == []


def test_a_header_is_read_field_by_field(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "# Question: does it\n#   go on?\n# free text: here\n# Verified: no, never\nrun: {seed: 1}\n# Hardware: late\n"
    )
    assert read_card(path) == RecipeCard(
        name="r",
        question="does it go on?",
        hardware="not stated",
        expected="not stated",
        source="not stated",
        verified="no, never",
    )


def test_ones_own_recipe_hides_one_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "arithmetic_grpo.yaml").write_text("defaults: [/train]\n")
    assert find_recipe("arithmetic_grpo", own_dir=tmp_path) == (tmp_path / "arithmetic_grpo.yaml").resolve()
    assert find_recipe("arithmetic_grpo", own_dir=None) == RECIPES["arithmetic_grpo"]


@pytest.mark.slow
def test_a_wheel_trains_and_reports_outside_of_the_sources(tmp_path: Path) -> None:
    # A copy, because building leaves its products beside the sources.
    source = tmp_path / "source"
    for name in ("algorithms", "rollout", "trainer", "configs", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    build = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run([sys.executable, "-m", *build], check=True, capture_output=True, timeout=300)
    site = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)

    def command(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "trainer", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300,
            env={"PYTHONPATH": str(site), "HOME": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "arithmetic_grpo" in command("recipes")
    words = ["run.num_steps=1", "model.num_steps=20", "tracking.wandb=disabled", "eval.max_prompts=2", "run.dir=run"]
    command("train", "arithmetic_grpo", "rollout=torch", *words)
    # The page has its scripts and styles from the wheel.
    assert command("report", "run").splitlines()[-1] == "run/report.html"
    origin = json.loads((tmp_path / "run" / "environment.json").read_text(encoding="utf-8"))
    assert str(ROOT) not in json.dumps(origin)


def commands(guide: Path) -> Iterator[tuple[str, list[str], bool]]:
    """(recipe, overrides, multirun) of every `parity train` with a recipe of the project in the code blocks of a guide,
    without those that a reader has to fill in: <run>."""
    for block in re.findall(r"^```\n(.*?)^```", guide.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").replace("$ parity", "parity").splitlines():
            if line.split()[:2] == ["parity", "train"] and "<" not in line:
                parsed, problems = PARSERS["train"].read(shlex.split(line, comments=True)[2:])
                assert not problems
                recipe, *words = parsed.words
                if recipe in RECIPES:
                    yield recipe, [word for word in words if not word.startswith("resume=")], parsed.multirun


@pytest.mark.parametrize("guide", [guide for guide in GUIDES if any(commands(guide))], ids=lambda guide: guide.stem)
def test_the_commands_of_a_guide_are_accepted(guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "my_reward.py").write_text("def reward(response, answer):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    for recipe, words, multirun in commands(guide):
        assert resolve(RECIPES[recipe], words, own_dir=None, multirun=multirun).problems == (), (recipe, words)
