"""The plan of a model of the hub: before it is fetched, with a part of its files, and where nobody answers."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_process import HEAVY, parity
from compose_cases import config_of
from huggingface_hub import constants
from policy_cases import make_config, save_policy, save_untied
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.task_config import FileDataConfig
from trainer.cli.plan import render_plan
from trainer.config.train import TrainConfig
from trainer.config.training import HFModelConfig, LoraConfig
from trainer.limits.adapter_shape import linear_shapes
from trainer.limits.estimate import model_shape
from trainer.limits.machine import Machine
from trainer.limits.memory_plan import memory_plan
from trainer.limits.model_shape import UnknownShapeError, described_shapes
from trainer.models.directory import HUB_TIMEOUT_S, find_model
from trainer.start import task_check

COMMIT = "0123456789abcdef0123456789abcdef01234567"
QWEN2_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}  # fmt: skip
SERVED = QWEN2_7B | {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
"""Sizes of Qwen2.5-0.5B."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, in which the commit of some/model is known and no file of it is."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


class Hub(http.server.ThreadingHTTPServer):
    """Has the config.json of some/model and nothing else; silent, it answers nothing."""

    daemon_threads, block_on_close = True, False

    def __init__(self, *, silent: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.silent, self.ends = silent, threading.Event()
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        if self.server.silent:
            self.server.ends.wait()
            return
        self.server.asked.append(f"{self.command} {self.path}")
        is_there = self.path == "/some/model/resolve/main/config.json" or self.path.endswith(f"{COMMIT}/config.json")
        body = json.dumps(SERVED).encode() if is_there else b""
        self.send_response(200 if is_there else 404)
        headers = {"ETag": '"a1"', "X-Repo-Commit": COMMIT} if is_there else {"X-Error-Code": "RepoNotFound"}
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub(*, silent: bool = False) -> Iterator[Hub]:
    server = Hub(silent=silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.ends.set()
        server.shutdown()
        server.server_close()


def ask(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub's library of this process ask `server`."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def named(tmp_path: Path, name: str = "some/model", **policy: object) -> TrainConfig:
    (tmp_path / "rows.jsonl").touch()
    rows = str(tmp_path / "rows.jsonl")
    config = make_config(tmp_path)
    return replace(
        config,
        model=HFModelConfig(path=name),
        data=FileDataConfig(train_path=rows, eval_path=rows),
        policy=replace(config.policy, **policy),
    )


def plan(config: TrainConfig) -> str:
    return render_plan(config, machine=Machine(cpus=2, gpus=0, memory=2**34), output_dir=Path("out"))


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"head_dim": 8}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 24}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_the_tensors_of_a_described_model_are_those_that_transformers_makes(kind: str, more: dict[str, Any]) -> None:
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **{**sizes, **more})
    with torch.device("meta"):
        made = {name: tuple(each.shape) for name, each in AutoModelForCausalLM.from_config(config).state_dict().items()}
    assert described_shapes(config.to_dict()) == made


def test_a_kind_that_is_not_known_says_which_number_is_missing(cache: Path, tmp_path: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "config.json").write_text(json.dumps(QWEN2_7B | {"model_type": "gemma3_text"}))
    with pytest.raises(UnknownShapeError, match="gemma3_text has its number of parameters"):
        model_shape(named(tmp_path))


def test_the_cache_of_the_hub_is_used_file_by_file(cache: Path, tmp_path: Path) -> None:
    config = named(tmp_path, lora=LoraConfig(rank=4))
    assert "memory      unknown: some/model is not a local directory, and the hub's cache has no" in plan(config)
    save_untied(tmp_path / "made")
    whole = model_shape(named(tmp_path, str(tmp_path / "made")))
    cache.mkdir(parents=True)
    files = sorted((tmp_path / "made").iterdir(), key=lambda file: (file.suffix == ".safetensors", file.name))
    assert sum(file.suffix == ".safetensors" for file in files) > 2
    for file in files:  # as a download puts them there one after the other
        (cache / file.name).symlink_to(file)
        if (cache / "config.json").exists():
            assert model_shape(config) == whole
    assert f"{whole.num_parameters:,} parameters, frozen; LoRA of rank 4 on all trains " in plan(config)
    assert linear_shapes(config) == linear_shapes(named(tmp_path, str(tmp_path / "made")))
    of_another = replace(config, model=HFModelConfig(path="some/model", revision="v2"))
    assert "memory      unknown: " in plan(of_another)


def test_a_run_plans_the_model_on_its_disk(tmp_path: Path) -> None:
    save_policy(tmp_path / "fetched")
    by_name = memory_plan(named(tmp_path, "none/such"), device_bytes=2**40, model_path=tmp_path / "fetched")
    in_directory = memory_plan(named(tmp_path, str(tmp_path / "fetched")), device_bytes=2**40)
    assert by_name.rank is not None and by_name.rank == in_directory.rank and by_name.verdict == in_directory.verdict


def test_a_directory_that_lacks_a_part_of_the_weights_is_refused(tmp_path: Path) -> None:
    save_untied(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert find_model("model.path", str(tmp_path), None) == tmp_path
    lost = max(tmp_path.glob("*.safetensors"))
    lost.unlink()
    assert f"no {lost.name} in {tmp_path}" in str(find_model("model.path", str(tmp_path), None))


def test_the_dry_run_fetches_the_config_alone(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n' * 200)
    rows = tmp_path / "rows.jsonl"
    words = ["train", "gsm8k_grpo_qwen2.5_0.5b", f"data.train_path={rows}", f"data.eval_path={rows}", "--dry-run"]
    words += [
        "model.path=some/model",
        "batch.max_tokens_per_microbatch=2048",
        "policy.gpus_per_worker=0",
        "rollout=torch",
        "rollout.gpus_per_engine=0",
        "run.dir=out",
    ]
    with hub() as server:
        env = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        outcome = parity(*words, cwd=tmp_path, env=env, watched=HEAVY)
        assert (outcome.code, outcome.loaded) == (0, ()), outcome.err
        assert "494,032,768 parameters" in outcome.out and "memory      each of 1 rank: " in outcome.out
        assert {request.rpartition("/")[2] for request in server.asked if "some/model" in request} == {"config.json"}
        absent = parity(*words, "model.path=no/model", cwd=tmp_path, env=env)
        assert absent.code == 2 and "model.path must be a directory or a repository of the hub" in absent.err
    offline = parity(*words, cwd=tmp_path, env=env)
    assert offline.out == outcome.out, "the cache holds the config"


def test_a_model_of_the_hub_that_never_fits_is_refused_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(task_check, "this_machine", lambda: Machine(cpus=9, gpus=0, memory=2**30))
    with hub() as server:
        ask(server, monkeypatch)
        found = [str(problem) for problem in task_check.task_problems([named(tmp_path)])]
    assert any(line.startswith("model must fit into 1 GiB of memory: weights") for line in found)


def test_a_silent_hub_costs_seconds_and_the_plan_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub(silent=True) as server:
        ask(server, monkeypatch)
        began = time.monotonic()
        assert find_model("model.path", "some/model", None) is None
        assert time.monotonic() - began < HUB_TIMEOUT_S + 5
    assert "its number of parameters is missing" in plan(named(tmp_path))


GPU_BYTES = int(79.6 * 2**30)


@pytest.mark.parametrize(("words", "turns"), [((), False), (("policy.activation_checkpoint_every=0",), True)])
def test_policy_and_engine_of_the_lora_recipe_fit_together(
    cache: Path, tmp_path: Path, words: tuple[str, ...], turns: bool
) -> None:
    cache.mkdir(parents=True)
    (cache / "config.json").write_text(json.dumps(QWEN2_7B))
    (tmp_path / "rows.jsonl").touch()
    rows = tmp_path / "rows.jsonl"
    given = ["model.path=some/model", f"data.train_path={rows}", f"data.eval_path={rows}", *words]
    found = memory_plan(config_of(*given, name="gsm8k_lora_qwen2.5_7b"), device_bytes=GPU_BYTES)
    assert found.takes_turns is turns
    assert found.host_bytes is not None
    assert (found.host_bytes < 32e9) is not turns, "the host memory that the recipe names"
