"""The base model: what is trained on, that the same configs give the same bits, and what the cache survives."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from readers import needs_release_4, read, read_with_release_4
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen2ForCausalLM

from rollout.data.arithmetic import TOKENS, ArithmeticProblem, Demonstration, save_tokenizer
from trainer.config.training import ArithmeticModelConfig
from trainer.models.base_model import (
    IGNORED,
    WEIGHTS,
    build_base_model,
    collate,
    response_loss,
)
from trainer.rundir.cache import default_cache_dir, find_damage
from trainer.rundir.sealed_directory import MANIFEST

MODEL = ArithmeticModelConfig(hidden_size=64, num_layers=1, num_steps=2)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base_model(MODEL, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(built: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(built, trust_remote_code=False)


def demonstration(prompt: str, response: str) -> Demonstration:
    return Demonstration(problem=ArithmeticProblem(prompt=prompt, answer=""), response=response)


def weights(directory: Path) -> bytes:
    return (directory / WEIGHTS).read_bytes()


def refuse(step: int, num_steps: int, detail: str) -> None:
    pytest.fail("a cached model was trained again")


def test_only_the_response_and_its_end_are_learned(tokenizer: PreTrainedTokenizerBase) -> None:
    batch = collate([demonstration("12+3=", "2+3=5"), demonstration("1+1=", "2")], tokenizer)
    assert batch.token_ids.tolist() == [
        [3, 4, 12, 5, 13, 4, 12, 5, 13, 7, 1],
        [3, 12, 3, 13, 4, 1, 0, 0, 0, 0, 0],
    ]
    assert batch.labels.tolist() == [
        [IGNORED] * 5 + [4, 12, 5, 13, 7, 1],
        [IGNORED] * 4 + [4, 1] + [IGNORED] * 5,
    ]


def test_the_loss_is_the_mean_over_response_tokens_whatever_the_padding(
    built: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    network = Qwen2ForCausalLM.from_pretrained(built)
    long, short = demonstration("12+3=", "2+3=5"), demonstration("1+1=", "2")
    alone = [response_loss(network, collate([one], tokenizer)).item() for one in (long, short)]
    together = response_loss(network, collate([long, short], tokenizer)).item()
    assert together == pytest.approx((6 * alone[0] + 2 * alone[1]) / 8, rel=1e-5)


def test_the_directory_loads_as_a_hugging_face_model(built: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    network = AutoModelForCausalLM.from_pretrained(built, trust_remote_code=False)
    assert type(network).__name__ == "Qwen2ForCausalLM"
    assert network.config.architectures == ["Qwen2ForCausalLM"]
    assert network.config.vocab_size == len(TOKENS)
    assert network.config.num_attention_heads == 2
    assert network.lm_head.weight is network.model.embed_tokens.weight
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    assert network.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    assert network.generation_config.pad_token_id == tokenizer.pad_token_id == 0
    generated = network.generate(torch.tensor([tokenizer("3+4=").input_ids]), max_new_tokens=3, do_sample=False)
    assert generated.shape[1] > 4


@needs_release_4
def test_transformers_4_reads_the_same(built: Path, tmp_path: Path) -> None:
    here, [found] = read(built), read_with_release_4([built], tmp_path)
    torch.testing.assert_close(found.log_probs, here.log_probs, atol=1e-5, rtol=0)
    assert (found.generated, found.tokenizer) == (here.generated, "PreTrainedTokenizerFast")
    described = json.loads((built / "config.json").read_text())
    assert (described["rope_theta"], described["torch_dtype"]) == (
        described["rope_parameters"]["rope_theta"],
        "float32",
    )


def test_training_lowers_the_loss_and_reports_every_step(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    model = ArithmeticModelConfig(hidden_size=64, num_layers=1, num_steps=60)
    build_base_model(model, cache_dir=tmp_path, progress=lambda *call: calls.append(call))
    assert [(step, total) for step, total, _ in calls] == [(step, 60) for step in range(1, 61)]
    losses = [float(detail.removeprefix("loss ")) for *_, detail in calls]
    assert losses[0] > 2.5  # ln 16 = 2.77: the untrained model knows nothing
    assert losses[-1] < 1.8  # the frequencies of the tokens alone give about 2.4


def test_the_same_configs_give_the_same_bits(built: Path, tmp_path: Path) -> None:
    torch.manual_seed(12345)  # the caller's generator must not matter ...
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    again = build_base_model(MODEL, cache_dir=tmp_path)
    # ... nor be moved on, nor its threads be changed.
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert weights(again) == weights(built)
    assert again.name == built.name


@pytest.mark.parametrize("change", [{"num_steps": 3}, {"hidden_size": 32}, {"num_layers": 2}, {"calculator": True}])
def test_other_configs_give_other_weights_under_another_name(
    built: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    other = build_base_model(replace(MODEL, **change), cache_dir=tmp_path)
    assert other.name != built.name
    assert weights(other) != weights(built)


def test_the_second_call_trains_nothing(built: Path) -> None:
    before = (built / WEIGHTS).stat()
    assert build_base_model(MODEL, cache_dir=built.parent, progress=refuse) == built
    assert (built / WEIGHTS).stat() == before
    assert find_damage(built) is None


def cut_weights(entry: Path) -> None:
    (entry / WEIGHTS).write_bytes(weights(entry)[:-100])


def flip_one_bit(entry: Path) -> None:
    content = bytearray(weights(entry))
    content[-1] ^= 1
    (entry / WEIGHTS).write_bytes(content)


def lose_tokenizer(entry: Path) -> None:
    (entry / "tokenizer.json").unlink()


def cut_manifest(entry: Path) -> None:
    (entry / MANIFEST).write_text('{"config.json": ')


def empty_manifest(entry: Path) -> None:
    (entry / MANIFEST).write_text("{}")


def lose_everything(entry: Path) -> None:
    for file in entry.iterdir():
        file.unlink()


@pytest.mark.parametrize(
    "damage", [cut_weights, flip_one_bit, lose_tokenizer, cut_manifest, empty_manifest, lose_everything]
)
def test_a_damaged_entry_is_built_again(
    built: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    entry = tmp_path / built.name
    shutil.copytree(built, entry)
    assert find_damage(entry) is None
    damage(entry)
    assert find_damage(entry) is not None
    assert build_base_model(MODEL, cache_dir=tmp_path) == entry
    assert "is damaged" in caplog.text
    assert find_damage(entry) is None
    assert weights(entry) == weights(built)
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def stop(step: int, num_steps: int, detail: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_base_model(MODEL, cache_dir=tmp_path, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_lost_a_file_is_not_published(tmp_path: Path) -> None:
    def remove_tokenizer(step: int, num_steps: int, detail: str) -> None:
        for lost in tmp_path.glob("*/tokenizer.json"):
            lost.unlink()

    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        build_base_model(MODEL, cache_dir=tmp_path, progress=remove_tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_of_two_builds_at_the_same_time_the_first_to_end_is_kept(tmp_path: Path) -> None:
    inner: list[tuple[Path, int]] = []

    def overtake(step: int, num_steps: int, detail: str) -> None:
        if step == 1:
            entry = build_base_model(MODEL, cache_dir=tmp_path)
            inner.append((entry, (entry / WEIGHTS).stat().st_ino))

    entry = build_base_model(MODEL, cache_dir=tmp_path, progress=overtake)
    assert inner == [(entry, (entry / WEIGHTS).stat().st_ino)]
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


def test_leftovers_of_a_killed_build_are_removed_once_they_are_old(built: Path, tmp_path: Path) -> None:
    running, abandoned = (tmp_path / f"{built.name}.building-{name}" for name in ("running", "abandoned"))
    for directory in (running, abandoned):
        directory.mkdir()
        save_tokenizer(directory)
    long_ago = time.time() - 86400
    os.utime(abandoned, (long_ago, long_ago))
    entry = build_base_model(MODEL, cache_dir=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {entry.name, running.name}


def test_the_cache_lies_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path / "here"))
    assert default_cache_dir() == tmp_path / "here"
    monkeypatch.delenv("PARITY_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "parity"
