"""The scenarios use what the tests of the parts use: their helpers are found as from those tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for folder in ("rollout", "trainer", "e2e"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / folder))


@pytest.fixture(scope="session")
def base_model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """PARITY_CACHE for the session, so that the hurried base model is built once and never leaves a trace."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARITY_CACHE", str(cache))
        yield cache
