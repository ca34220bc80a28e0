"""A Ray cluster for each file of end-to-end tests, and one base-model cache for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.cluster.placement import ray_session


@pytest.fixture(scope="session")
def base_model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """PARITY_CACHE for the session, so that the hurried base model is built once and never leaves a trace."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARITY_CACHE", str(cache))
        yield cache


@pytest.fixture(scope="module")
def local_ray(base_model_cache: Path) -> Iterator[None]:
    """Ray for the runs of one file inside this process: starting it once saves most of the time of a short run.

    It ends with the file, because other tests of the process start a cluster of their own.
    """
    with ray_session(None):
        yield
