"""A Ray cluster for each file of end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.cluster.ray_session import ray_session


@pytest.fixture(scope="module")
def local_ray(base_model_cache: Path) -> Iterator[None]:
    """Ray for the runs of one file inside this process: starting it once saves most of the time of a short run.

    It ends with the file, because other tests of the process start a cluster of their own.
    """
    with ray_session(None):
        yield
