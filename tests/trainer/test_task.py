"""What a run works on: a mistake in it is named before an engine starts."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from trainer.compose.catalog import find_recipe
from trainer.compose.compose import resolve
from trainer.config.train import TrainConfig
from trainer.config.training import HFModelConfig
from trainer.run import task
from trainer.rundir.run_dir import StartError


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    recipe = find_recipe("arithmetic_grpo", own_dir=None)
    assert isinstance(recipe, Path)
    found = resolve(recipe, ["model.num_steps=1"], own_dir=None, multirun=False).runs[0].config
    assert found is not None
    return found


def silent_progress(done: int, total: int, detail: str) -> None:
    """No progress is shown."""


def test_a_model_that_is_nowhere_is_named_with_its_key(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_hub(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(task, "fetch_model", no_hub)
    config = replace(config, model=HFModelConfig(path="modle"))
    with pytest.raises(
        StartError, match=r"model\.path must be a directory or .*, got 'modle'\. .* no connection"
    ) as caught:
        task.resolve_model(config, progress=silent_progress)
    assert "\n" not in str(caught.value)


def test_a_hub_that_accepts_and_never_answers_is_named_within_a_deadline(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
        config = replace(config, model=HFModelConfig(path="owner/model"))
        begin = time.monotonic()
        with pytest.raises(StartError, match=r"got 'owner/model'\. .* the hub says .*timed out"):
            task.resolve_model(config, progress=silent_progress)
    assert time.monotonic() - begin < 60
