"""Files of a model that cannot be read, do not fit each other, or do not fit the run: found before a start."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import task_cases
import torch
from cli_process import HEAVY, parity
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from task_cases import config_of, edit_config

from rollout.data.hub import SECOND_COPIES, SNAPSHOT_FILES
from rollout.weights.files import tensor_shapes
from trainer.cli.commands import run
from trainer.limits.adapter_shape import stored_linear_shapes
from trainer.run.task import load_task

made, own = task_cases.made, task_cases.own


def test_files_that_say_how_the_model_computes_and_where_it_stops_have_digests(own: Path) -> None:
    with TemporaryDirectory(dir=own) as directory:
        shutil.copytree(own / "tiny", directory, dirs_exist_ok=True)
        config = config_of(own, f"model.path={directory}")
        before = load_task(config, progress=lambda *_: None).model_files
        edit_config(Path(directory), rms_norm_eps=0.5)
        after = load_task(config, progress=lambda *_: None).model_files
    changed = [path for path in before if before[path] != after[path]]
    assert changed == [str(Path(directory) / "config.json")] and before.keys() == after.keys()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, "lack parameters of the model"),
        ({"intermediate_size": 48}, "the model wants [48, "),
        ({"layer_types": ["full_attention"] * 9}, "layer_types"),
        ({"model_type": "nosuch", "auto_map": {}}, "code that comes with a model is never run."),
    ],
)
def test_files_that_are_not_those_of_the_config_are_refused_by_the_dry_run(
    own: Path, tmp_path: Path, fields: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(own / "tiny", tmp_path / "edited")
    edit_config(tmp_path / "edited", **fields)
    assert run(["train", "mine.yaml", f"model.path={tmp_path / 'edited'}", "--dry-run"]) == 2
    problem = capsys.readouterr().err.splitlines()[-1]
    assert "model.path must hold the weights of the model that its config.json describes" in problem and said in problem


def test_files_to_evaluate_are_compared_before_an_engine_is_started(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(own / "tiny", tmp_path / "edited")
    edit_config(tmp_path / "edited", intermediate_size=48)
    assert run(["eval", "mine.yaml", f"checkpoint={tmp_path / 'edited'}", f"run.dir={tmp_path / 'eval'}"]) == 2
    problem = capsys.readouterr().err.splitlines()[-1]
    assert "checkpoint must hold the weights of the model that its config.json describes" in problem


def test_a_tokenizer_that_is_no_json_is_named_with_its_file(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(own / "tiny", tmp_path / "edited")
    (tmp_path / "edited" / "tokenizer.json").write_text("{")
    assert run(["train", "mine.yaml", f"model.path={tmp_path / 'edited'}", "--dry-run"]) == 2
    assert "must be the directory of a Hugging Face model whose files can be read" in (said := capsys.readouterr().err)
    assert "tokenizer.json: Expecting property name" in said and "Mend the file" in said


UNREADABLE = [
    ("generation_config.json", '{"eos_token_id": 256', "generation_config.json: Expecting ',' delimiter"),
    ("config.json", '{"model_type": "qwen2",}', "config.json: Expecting property name"),
    ("config.json", "\xef\xbb\xbf{}", "config.json: Unexpected UTF-8 BOM"),
    ("generation_config.json", "null", "generation_config.json: it must hold a JSON object, got null"),
    ("generation_config.json", '{"eos_token_id": [1, "2"]}', "eos_token_id must be a token id or a list of them"),
    (
        "model.safetensors.index.json",
        "[]",
        "model.safetensors.index.json: it must hold a JSON object, got an array",
    ),
    ("special_tokens_map.json", "\xe9", "special_tokens_map.json: 'utf-8' codec can't decode"),
    ("added_tokens.json", "[" * 100_000, "added_tokens.json: maximum recursion depth"),
    ("chat_template.jinja", "\xff\xfe", "chat_template.jinja: 'utf-8' codec can't decode"),
    (
        "config.json",
        '{"model_type": "qwen2", "text_config": [1]}',
        "config.json: text_config must be a JSON object",
    ),
]
"""A file of a model, its content in Latin-1, and what is said of it."""


def test_every_file_that_cannot_be_read_is_named_before_anything_heavy_is_loaded(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / f"edited{number}" for number in range(len(UNREADABLE))]
    for path, (name, text, _) in zip(paths, UNREADABLE, strict=True):
        shutil.copytree(own / "tiny", path)
        (path / name).write_bytes(text.encode("latin-1"))
    swept = f"model.path={','.join(map(str, paths))}"
    done = parity("train", "-m", str(own / "mine.yaml"), swept, "--dry-run", cwd=own, watched=HEAVY)
    assert (done.code, done.loaded) == (2, ()), done.err
    lines = done.err.splitlines()[1:]
    for path, line, (_, _, fault) in zip(paths, lines, UNREADABLE, strict=True):
        assert "model.path must be the directory of a Hugging Face model whose files can be read" in line
        assert f"got '{path}'" in line
        assert fault in line
        assert run(["eval", "mine.yaml", f"checkpoint={path}"]) == 2
        said = capsys.readouterr().err
        assert "checkpoint must be the directory of a Hugging Face model whose files can be read" in said
        assert fault in said


def test_the_file_of_a_critic_that_cannot_be_read_is_named(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(own / "tiny", tmp_path / "edited")
    (tmp_path / "edited" / "tokenizer.json").write_text("{")
    words = ["advantage.estimator=gae", f"critic.path={tmp_path / 'edited'}", "--dry-run"]
    assert run(["train", "mine.yaml", *words]) == 2
    assert "critic.path must be the directory of a Hugging Face model whose files can be" in capsys.readouterr().err


def test_a_cache_for_a_model_that_is_to_be_made_must_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").write_text("not a directory")
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path / "cache"))
    assert run(["train", "arithmetic_grpo", "rollout=torch", "--dry-run"]) == 2
    assert "$PARITY_CACHE must be a directory that can be written to" in capsys.readouterr().err


def cut_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def save_in_one_file_beside_several(directory: Path) -> None:
    """As save_pretrained does it in a directory that holds a model in one file: transformers reads that."""
    path, later = directory / "model.safetensors", directory / "model-00001-of-00001.safetensors"
    shutil.copy(path, later)
    index = {"weight_map": dict.fromkeys(load_file(path), later.name)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def add_expert(directory: Path) -> None:
    path = directory / "model.safetensors"
    save_file(load_file(path) | {"model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2, 2)}, path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_weights, r"safetensors files that can be read .*model.safetensors is damaged.*Copy or download"),
        (lambda path: edit_config(path, architectures=["BertModel"]), r"must be a causal language model.*'BertModel'"),
        (
            lambda path: edit_config(path, num_hidden_layers=7),
            r"num_hidden_layers is 7, and the safetensors files hold another number of layers .*got [12]\. Save the",
        ),
        (
            lambda path: edit_config(path, hidden_size=16),
            r"vocab_size and hidden_size make an embedding of \[300, 16\]",
        ),
        (
            lambda path: edit_config(path, quantization_config={"quant_method": "fp8"}),
            r"must hold weights that are not quantised.* got 'fp8'\. Name the model in 16 or 32 bits",
        ),
        (
            lambda path: edit_config(path, model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"}),
            r"must be of another family: its attention has sinks.* got 'gpt_oss'",
        ),
        (
            lambda path: edit_config(path, model_type="stablelm"),
            r"must be of another family: its class in transformers does not tell .* got 'stablelm'",
        ),
        (
            lambda path: edit_config(path, model_type="qwen3_moe", num_experts=2, num_experts_per_tok=4),
            r"whose files can be read.* num_experts_per_tok=4 must be 1 to 2, the number of experts of a layer",
        ),
        (save_in_one_file_beside_several, r"two sets of weights; remove the older one"),
        (
            lambda path: (path / "adapter_config.json").write_text("{}"),
            r"must hold a model without the adapter_config.json of an adapter",
        ),
        (add_expert, r"must be a dense model, or a mixture of experts of one of the families"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_model_that_cannot_be_trained_is_refused_before_anything_starts(
    own: Path, damage: Callable[[Path], None], words: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with TemporaryDirectory(dir=own) as directory:
        shutil.copytree(own / "tiny", directory, dirs_exist_ok=True)
        damage(Path(directory))
        before = sorted(own.iterdir())
        assert run(["train", "mine.yaml", f"model.path={directory}", *more]) == 2
        assert re.search(words, capsys.readouterr().err)
        assert sorted(own.iterdir()) == before


@pytest.mark.parametrize("indexed", [False, True], ids=["one file", "index"])
def test_a_second_copy_of_the_weights_under_other_names_is_not_read(own: Path, tmp_path: Path, indexed: bool) -> None:
    """As Mistral's repositories have it; SGLang and transformers leave it out too."""
    shutil.copytree(own / "tiny", path := tmp_path / "mistral")
    before = tensor_shapes(path)
    if indexed:
        (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(before, "model-00001-of-00001.safetensors")}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"layers.0.attention.wq.weight": torch.zeros(8, 8)}, path / "consolidated.safetensors")
    assert tensor_shapes(path) == before
    assert "layers.0.attention.wq" not in stored_linear_shapes(path)
    fetched = filter_repo_objects(
        [each.name for each in path.iterdir()], allow_patterns=SNAPSHOT_FILES, ignore_patterns=SECOND_COPIES
    )
    assert set(fetched) == {each.name for each in path.iterdir()} - {"consolidated.safetensors"}


def test_exact_arithmetic_is_refused_for_an_activation_that_it_lacks(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = ("rollout.exact=true", "rollout.dtype=float32", "policy.dtype=float32", "--dry-run")
    with TemporaryDirectory(dir=own) as directory:
        shutil.copytree(own / "tiny", directory, dirs_exist_ok=True)
        assert run(["train", "mine.yaml", f"model.path={directory}", *exact]) == 0
        assert re.search(r"engines +torch, float32, the bits of the trainer\n", capsys.readouterr().out)
        edit_config(Path(directory), hidden_act="gelu")
        assert run(["train", "mine.yaml", f"model.path={directory}", *exact]) == 2
        assert "rollout.exact must be false for a model with hidden_act=gelu" in capsys.readouterr().err
        assert run(["train", "mine.yaml", f"model.path={directory}", *exact, "rollout.exact=false"]) == 0
        mixture = {"model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2}
        edit_config(Path(directory), hidden_act="silu", **mixture)
        assert run(["train", "mine.yaml", f"model.path={directory}", *exact]) == 2
        assert "rollout.exact must be false for a glm4_moe" in capsys.readouterr().err


def test_exact_arithmetic_of_a_mixture_is_refused_on_gpus_and_with_factors_of_the_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exact = ("arithmetic_moe", "rollout=torch", "rollout.exact=true", "rollout.dtype=float32", "--dry-run")
    assert run(["train", *exact]) == 0
    assert re.search(r"engines +torch, float32, the bits of the trainer\n", capsys.readouterr().out)
    assert run(["train", *exact, "policy.gpus_per_worker=1", "rollout.gpus_per_engine=1"]) == 2
    assert "rollout.exact must be false for a mixture of experts on GPUs" in capsys.readouterr().err
    assert run(["train", *exact, "policy.routing=weights"]) == 2
    assert "policy.routing must be replay or live with rollout.exact=true" in capsys.readouterr().err
    assert run(["train", *exact, "policy.routing=weights", "rollout.exact=false"]) == 0


def test_factors_of_experts_are_refused_for_a_dense_model(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for recipe in ("mine.yaml", "arithmetic_grpo"):
        assert run(["train", recipe, "policy.routing=weights", "--dry-run"]) == 2
        assert re.search("policy.routing has no effect: .* is a dense model", capsys.readouterr().err)
