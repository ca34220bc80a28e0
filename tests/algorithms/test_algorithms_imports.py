"""The package imports torch and the standard library only, and its configuration does not import torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import algorithms

PACKAGE = Path(algorithms.__file__).parent
WITHOUT_TORCH = ("algorithms", "algorithms.config", "algorithms.objective")


def imported_roots(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports, at any depth."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path.name}: relative import"
            roots.add(node.module.split(".")[0])
    return roots


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("**/*.py")), ids=lambda path: path.name)
def test_only_torch_and_the_standard_library(path: Path) -> None:
    assert imported_roots(path) <= set(sys.stdlib_module_names) | {"torch", "algorithms"}


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_importable_without_torch(module: str) -> None:
    program = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, timeout=60, check=False)
    assert done.returncode == 0
