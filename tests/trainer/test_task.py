"""What a run works on: a mistake in it is named before an engine starts."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from data_cases import byte_tokenizer
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from policy_cases import save_policy
from transformers import AddedToken

from rollout.config import SamplingConfig
from rollout.task_config import FileDataConfig, RewardConfig
from rollout.types import FinishReason, Prompt, Sample, SampleGroup
from trainer.compose.catalog import find_recipe
from trainer.compose.compose import resolve
from trainer.config.train import TrainConfig
from trainer.config.training import HFModelConfig
from trainer.models import resolve as models
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

    monkeypatch.setattr(models, "fetch_model", no_hub)
    config = replace(config, model=HFModelConfig(path="modle"))
    with pytest.raises(
        StartError, match=r"model\.path must be a directory or .*, got 'modle'\. .* no connection"
    ) as caught:
        models.resolve_model(config, progress=silent_progress)
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
            models.resolve_model(config, progress=silent_progress)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("opened", ["", "[THINK]"], ids=["by the response", "by the prompt"])
def test_thoughts_between_special_tokens_state_no_answer(config: TrainConfig, tmp_path: Path, opened: str) -> None:
    path = save_policy(tmp_path / "model", vocab_size=300)
    tokenizer = byte_tokenizer(path)
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("[THINK]", "[/THINK]", "<end>")])
    tokenizer.chat_template = f"{{{{ messages[0].content }}}}{opened}"
    tokenizer.save_pretrained(path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "2+3?", "answer": "5"}\n')
    config = replace(
        config,
        model=HFModelConfig(path=str(path)),
        data=FileDataConfig(train_path=str(rows), eval_path=str(rows), max_prompt_tokens=64),
        sampling=SamplingConfig(max_new_tokens=64),
        reward=RewardConfig(function="gsm8k_flexible", num_workers=1),
    )
    found = task.load_task(config, progress=silent_progress)
    [prompt] = found.dataset.train
    begun = "" if opened else "[THINK]"
    texts = [f"{begun}4 or 5?[/THINK]It is <end>5", f"{begun}5[/THINK]It is 6", f"{begun}It may be 5"]
    samples = [sample_of(prompt, tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    with closing(found.scorer):
        found.scorer.score([SampleGroup(prompt=prompt, samples=samples)])
    assert [sample.correct for sample in samples] == [True, False, False]
    assert samples[0].text == f"{begun}4 or 5?[/THINK]It is 5"


def sample_of(prompt: Prompt, response: list[int]) -> Sample:
    """A sample with the tokens of `response`."""
    size = len(prompt.token_ids), len(response)
    return Sample(
        prompt_id=prompt.prompt_id,
        sample_index=0,
        token_ids=[*prompt.token_ids, *response],
        response_mask=[False] * size[0] + [True] * size[1],
        rollout_logprobs=[0.0] * sum(size),
        token_versions=[0] * sum(size),
        finish_reason=FinishReason.stop,
    )
