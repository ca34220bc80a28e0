"""The shape of the repository as a gate: who imports whom, where Ray is called, what loads fast, what recipes
state, what is pinned.

The rules inside single files are in tests/test_style.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_style import ROOT, SOURCE_DIRS, Source, parse, sources

TOP_LEVEL = frozenset(
    [
        "pyproject.toml",
        "trainer",
        "rollout",
        "algorithms",
        "configs",
        "recipes",
        "tests",
        "benchmarks",
        "docs",
        "requirements",
        "Dockerfile",
        "Makefile",
        "README.md",
        "LICENSE",
    ]
)
"""What the repository shows at the top; files that begin with a dot come in addition."""

FORBIDDEN_IMPORTS = {"algorithms": ("rollout", "trainer"), "rollout": ("trainer",), "trainer": ()}
"""Package -> packages that it never imports: algorithms <- rollout <- trainer."""

RAY_FILES = frozenset(
    {
        "rollout/group/actor_calls.py",
        "rollout/group/engine_group.py",
        "trainer/cluster/policy_group.py",
        "trainer/cluster/placement.py",
    }
)
"""The only files that call actors and wait for them; everybody else calls typed methods."""

LIGHT_MODULES = (
    "algorithms.config",
    "rollout.config",
    "rollout.task_config",
    "rollout.types",
    "trainer.config.train",
    "trainer.cli.commands",
    "trainer.compose.outcome",
    "trainer.__main__",
)
HEAVY_MODULES = ("torch", "ray", "sglang", "transformers", "datasets", "wandb")

MAX_RECIPE_LINES = 40
RECIPE_FIELDS = ("Question", "Hardware", "Expected", "Verified")


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of the file, also inside functions, with relative imports resolved."""
    package = source.path.removesuffix("__init__.py").removesuffix(".py").strip("/").split("/")
    if not source.path.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
    for name, call in source.calls():
        if name in ("importlib.import_module", "import_module", "__import__") and call.args:
            argument = call.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield call.lineno, argument.value


def wrong_imports(source: Source) -> Iterator[str]:
    package = source.path.partition("/")[0]
    for line, module in imported_modules(source):
        root = module.partition(".")[0]
        if root in FORBIDDEN_IMPORTS[package]:
            yield f"{source.path}:{line}: {package} imports {module}"
        if package == "algorithms" and root not in ("algorithms", "torch") and root not in sys.stdlib_module_names:
            yield f"{source.path}:{line}: algorithms imports {module}, which is neither torch nor the standard library"


def ray_calls(source: Source) -> Iterator[str]:
    for name, call in source.calls():
        if name.endswith(".remote") or name in ("ray.get", "ray.wait"):
            yield f"{source.path}:{call.lineno}: {name}()"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "ray":
            for alias in node.names:
                if alias.name in ("get", "wait"):
                    yield f"{source.path}:{node.lineno}: from ray import {alias.name}"


def test_imports_point_one_way() -> None:
    found = [problem for source in sources(*SOURCE_DIRS) for problem in wrong_imports(source)]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("algorithms/a.py", "from rollout.types import Sample"),
        ("algorithms/a.py", "def f():\n import numpy"),
        ("algorithms/a.py", "from ..trainer import loop"),
        ("rollout/sglang/a.py", "if TYPE_CHECKING:\n from trainer.config.train import TrainConfig"),
        ("rollout/a.py", "importlib.import_module('trainer.run.loop')"),
    ],
)
def test_wrong_imports_are_caught(path: str, text: str) -> None:
    assert list(wrong_imports(parse(text, path)))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("algorithms/a.py", "import math\nimport torch.nn.functional\nfrom algorithms.kl import k3\nfrom . import kl"),
        ("rollout/a.py", "from algorithms.config import Problem\nimport numpy"),
        ("trainer/a.py", "from rollout.types import Sample\nimport ray"),
    ],
)
def test_right_imports_pass(path: str, text: str) -> None:
    assert not list(wrong_imports(parse(text, path)))


def test_only_the_groups_call_ray() -> None:
    checked = sources(*SOURCE_DIRS)
    found = [problem for source in checked if source.path not in RAY_FILES for problem in ray_calls(source)]
    assert not found, "\n".join(["", *found])
    # If the groups themselves were not found, the rule would be looking for the wrong thing.
    assert {source.path for source in checked if list(ray_calls(source))} == RAY_FILES


@pytest.mark.parametrize(
    "text", ["worker.train.remote(batch)", "ray.get(ref)", "ray.wait([ref])", "from ray import get"]
)
def test_ray_calls_are_caught(text: str) -> None:
    assert list(ray_calls(parse(text)))


def test_only_one_place_starts_python() -> None:
    """`python_module` keeps the working directory off the path of every child."""
    found = {source.path for source in sources(*SOURCE_DIRS) if "sys.executable" in source.text}
    assert found == {"rollout/processes/child_process.py"}


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_loads_without_heavy_modules(module: str) -> None:
    """The command line answers, and refuses a wrong config, before torch or Ray is loaded."""
    program = f"import sys, {module}; sys.stdout.write(' '.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert module in loaded
    assert not loaded & set(HEAVY_MODULES)


RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def test_recipes_are_found() -> None:
    assert "arithmetic_grpo" in {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_short_and_says_what_it_is_for(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_RECIPE_LINES
    header = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    stated = [line for line in header if re.match(rf"# ({'|'.join(RECIPE_FIELDS)}): \S", line)]
    assert [line.split(":")[0] for line in stated] == [f"# {field}" for field in RECIPE_FIELDS]
    assert re.match(r"# Verified: (yes|no), \S", stated[-1]), "verified is yes or no, and says where or why not"


def pins(name: str) -> dict[str, str]:
    """Distribution -> version of one list in requirements/; a line that is not an exact pin fails."""
    found = {}
    for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)==([\w.+-]+)", line)
            assert match, f"requirements/{name}: {line}"
            found[canonicalize_name(match[1])] = match[2]
    return found


def declared() -> dict[str, list[Requirement]]:
    """Requirements of pyproject.toml, by the list that pins them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = {
        "cpu.txt": project["dependencies"],
        "sglang-cpu.txt": extras["sglang"],
        "dev.txt": extras["dev"] + extras["tensorboard"],
    }
    return {name: [Requirement(line) for line in lines] for name, lines in named.items()}


@pytest.mark.parametrize("name", ["cpu.txt", "sglang-cpu.txt", "dev.txt"])
def test_pins_satisfy_what_is_declared(name: str) -> None:
    pinned = pins("cpu.txt") | pins(name)  # every list is installed on top of the first
    for requirement in declared()[name]:
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_gpu_image_gets_the_same_versions() -> None:
    assert pins("gpu.txt").items() <= pins("cpu.txt").items()


def test_imports_are_declared() -> None:
    """What the sources import stands in pyproject.toml: nothing comes by way of somebody else's requirements."""
    names = {canonicalize_name(requirement.name) for lines in declared().values() for requirement in lines}
    providers = packages_distributions()
    missing = set()
    for source in sources(*SOURCE_DIRS):
        for line, module in imported_modules(source):
            root = module.partition(".")[0]
            if root in SOURCE_DIRS or root in sys.stdlib_module_names:
                continue
            if not names & {canonicalize_name(provider) for provider in providers.get(root, [root])}:
                missing.add(f"{source.path}:{line}: {root}")
    assert not missing, "\n".join(["", *sorted(missing)])


def test_top_level_holds_nothing_else() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: build products cannot be told from sources")
    names = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL
