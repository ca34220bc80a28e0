"""The scenarios use what the tests of the parts use: their helpers are found as from those tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from asked_run import Asked

for folder in ("rollout", "trainer", "e2e"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / folder))


@pytest.fixture
def asked(tmp_path: Path, base_model_cache: Path) -> Iterator[Callable[..., Asked]]:
    runs: list[Asked] = []

    def begin(*words: str, **options: Any) -> Asked:
        runs.append(Asked(tmp_path, *words, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()
