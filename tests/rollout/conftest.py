"""One SGLang server for all tests that leave a server as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sglang_cases import Served, start_served

from rollout.config import DType


@pytest.fixture(scope="package")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Qwen2, tied, float32."""
    running = start_served(tmp_path_factory.mktemp("qwen2"), model_type="qwen2", tied=True, dtype=DType.float32)
    yield running
    running.engine.stop()


@pytest.fixture
def served(one_server: Served) -> Iterator[Served]:
    """The server that the tests share, idle and with its first weights; its version counts on."""
    yield one_server
    one_server.restore()
