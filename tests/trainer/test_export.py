"""An exported checkpoint holds the trained weights, bit for bit, in a directory that transformers loads."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli_process import HEAVY, parity
from policy_cases import lone_worker, make_config, make_samples, save_policy, save_untied, save_words
from safetensors.torch import load_file, save_file
from test_packing import pack_samples
from tiny_model import BIASED, write_tiny_model
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    Qwen2ForCausalLM,
)

from algorithms.config import AdvantageConfig, Estimator
from rollout.config import DType
from rollout.data.dataset import StreamState
from rollout.weights.files import INDEX_FILE, tensor_shapes
from rollout.weights.packed_weights import stored_state
from trainer.config.outputs import CheckpointConfig, EvalConfig
from trainer.config.train import TrainConfig
from trainer.models.export import MAX_SHARD_BYTES, write_model
from trainer.policy.checkpoint_shards import load_shards
from trainer.policy.model import full_tensors, load_causal_lm
from trainer.run.evaluation import evaluate_model
from trainer.rundir.checkpoint import (
    POLICY,
    Checkpoint,
    CheckpointError,
    RunState,
    begin_checkpoint,
    checkpoint_at,
    chosen_checkpoint,
    commit_checkpoint,
)
from trainer.rundir.model_mark import model_mark
from trainer.rundir.weights_source import SourceKind, WeightsSource, checkpoint_of


def export_model(config: TrainConfig, run_dir: Path, directory: Path, *, best: bool = False) -> Checkpoint:
    """What `parity export` does."""
    checkpoint = chosen_checkpoint(config, run_dir, best=best)
    write_model(config, checkpoint, directory)
    return checkpoint


OF_RELEASE_4 = (b"TokenizersBackend", b"PreTrainedTokenizerFast")


@pytest.mark.parametrize("estimator", [Estimator.grpo, Estimator.gae], ids=["alone", "beside a critic"])
def test_the_exported_model_is_the_trained_one(
    tmp_path: Path, estimator: Estimator, capfd: pytest.CaptureFixture[str]
) -> None:
    start = save_words(save_policy(tmp_path / "start"))
    config = make_config(start, num_workers=1, advantage=AdvantageConfig(estimator=estimator))
    batch = pack_samples([make_samples()], num_ranks=1, max_tokens=1000, policy_version=0)
    with lone_worker(config, start) as worker:
        worker.train(batch.ranks[0], batch.samples, 1)
        unfinished = begin_checkpoint(tmp_path / "run", 1)
        worker.save_checkpoint(unfinished / POLICY, asynchronous=False)
        stream = StreamState(seed=0, epoch=0, position=0, digest="")
        state = RunState(step=1, policy_version=1, stream=stream, evaluation={"eval/accuracy": 0.5})
        commit_checkpoint(unfinished, state, keep=2)
        trained = {name: tensor.clone() for name, tensor in full_tensors(worker._policy.model)}
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert export_model(config, tmp_path / "run", tmp_path / "out").state.step == 1
    assert capfd.readouterr().err == "", "no bars and no warnings of libraries"
    (tmp_path / "plain").touch()  # what is exported is for sharing, as any new file is
    modes = {path.stat().st_mode for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert modes == {(tmp_path / "plain").stat().st_mode}
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    untrained = dict(AutoModelForCausalLM.from_pretrained(start).named_parameters())
    assert exported.keys() == untrained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in exported)
    assert not any(torch.equal(exported[name], untrained[name]) for name in exported if "proj.weight" in name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        as_it_is = (start / name).read_bytes().replace(*OF_RELEASE_4)
        assert (tmp_path / "out" / name).read_bytes() == as_it_is, "transformers would rebuild it"
    with pytest.raises(CheckpointError, match=r"needs a run that was trained with checkpoint\.best_metric"):
        export_model(config, tmp_path / "run", tmp_path / "best", best=True)
    for metric, has_it in (("eval/accuracy_sampled", False), ("eval/accuracy", True)):
        keeps_best = replace(config, eval=EvalConfig(every=1), checkpoint=CheckpointConfig(every=1, best_metric=metric))
        if has_it:
            assert export_model(keeps_best, tmp_path / "run", tmp_path / "best", best=True).state.step == 1
            continue
        with pytest.raises(CheckpointError, match="none of the run has eval/accuracy_sampled, got"):
            export_model(keeps_best, tmp_path / "run", tmp_path / "best", best=True)
    write_model(config, checkpoint_at(tmp_path / "run" / "checkpoints" / "step_000001"), tmp_path / "named")
    modes = {path.stat().st_mode for path in (tmp_path / "named").iterdir()}
    assert len(modes) == 1, "the weights have the mode of the other files"


def saved_after_a_step(start: Path, run_dir: Path) -> tuple[TrainConfig, Checkpoint, dict[str, torch.Tensor]]:
    """A checkpoint after one step from the model `start`, and the whole trained tensors in it."""
    config = make_config(start, num_workers=1)
    batch = pack_samples([make_samples()], num_ranks=1, max_tokens=1000, policy_version=0)
    with lone_worker(config, start) as worker:
        worker.train(batch.ranks[0], batch.samples, 1)
        unfinished = begin_checkpoint(run_dir, 1)
        worker.save_checkpoint(unfinished / POLICY, asynchronous=False)
        trained = {name: tensor.clone() for name, tensor in full_tensors(worker._policy.model)}
    state = RunState(step=1, policy_version=1, stream=StreamState(seed=0, epoch=0, position=0, digest=""))
    return config, commit_checkpoint(unfinished, state, keep=2), trained


@pytest.mark.parametrize("max_shard_bytes", [MAX_SHARD_BYTES, 9_000], ids=["one file", "several files"])
@pytest.mark.parametrize("save", [save_policy, save_untied])
def test_an_export_is_what_transformers_writes_of_the_whole_model(
    tmp_path: Path, save: Callable[[Path], Path], max_shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = save_words(save(tmp_path / "start"))
    GenerationConfig(temperature=0.625, do_sample=True, eos_token_id=[3, 7]).save_pretrained(start)
    config, checkpoint, trained = saved_after_a_step(start, tmp_path / "run")
    asked: list[int] = []
    living: list[weakref.ref[torch.Tensor]] = []

    def counted(state: dict[str, dict[str, dict[str, torch.Tensor]]], path: Path, *, alone: bool) -> None:
        tensors = state["policy"]["model"].values()
        assert not [tensor for tensor in living if tensor() is not None], "the file before is not forgotten"
        living[:] = map(weakref.ref, tensors)
        asked.append(sum(tensor.nbytes for tensor in tensors))
        load_shards(state, path, alone=alone)

    monkeypatch.setattr("trainer.models.export.load_shards", counted)
    write_model(config, checkpoint, tmp_path / "out", dtype=torch.bfloat16, max_shard_bytes=max_shard_bytes)
    assert max(asked) <= max_shard_bytes and (len(asked) > 3) == (max_shard_bytes < MAX_SHARD_BYTES)

    whole = load_causal_lm(start)
    whole.load_state_dict(trained, strict=False)
    torch.nn.Module.to(whole, torch.bfloat16)  # in place
    whole.save_pretrained(tmp_path / "whole", max_shard_size=max_shard_bytes)
    expected, found = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "out")
    )
    files = ("config.json", "generation_config.json")
    config_json, generation = (json.loads(expected.pop(name)) for name in files)
    names = {"torch_dtype": "bfloat16", "rope_theta": 10_000.0, "rope_scaling": None, "eos_token_id": [1, 3, 7]}
    assert json.loads(found.pop("config.json")) == config_json | names
    assert json.loads(found.pop("generation_config.json")) == generation | {"eos_token_id": [1, 3, 7]}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert found.pop(name) == (start / name).read_bytes().replace(*OF_RELEASE_4)
    if len(asked) == 1:
        assert found == expected
    else:  # transformers may put the tensors in another order into the files
        indexes = [json.loads(files.pop(INDEX_FILE)) for files in (expected, found)]
        assert indexes[0]["metadata"] == indexes[1]["metadata"]
        assert indexes[1]["weight_map"].keys() == trained.keys()
        others = [{name: files[name] for name in files if "safetensors" not in name} for files in (expected, found)]
        assert others[0] == others[1]
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(loaded[name], trained[name].to(torch.bfloat16)) for name in loaded)


@pytest.mark.parametrize("family", BIASED)
def test_the_bias_of_routers_goes_through_training_resume_and_export(tmp_path: Path, family: str) -> None:
    start = write_tiny_model(tmp_path / "start", model_type=family)
    save_words(tmp_path / "start")
    config, checkpoint, trained = saved_after_a_step(tmp_path / "start", tmp_path / "run")
    biases = {name: each for name, each in start.named_buffers() if name in trained}
    assert len(biases) == 2
    config = replace(config, rollout=replace(config.rollout, dtype=DType.bfloat16))
    with lone_worker(config, tmp_path / "start") as worker:
        for buffer in worker._policy.model.buffers():
            buffer.zero_()  # what a start would otherwise read from the same files
        worker.load_checkpoint(checkpoint.policy_path, 1)
        held = dict(full_tensors(worker._policy.model))
        assert all(torch.equal(held[name], each) for name, each in trained.items())
        shared = worker.publish_weights(2)
        assert shared is not None
        sent = {spec.name: spec.dtype for spec in shared.tensors}
    assert sent.keys() == trained.keys() and set(sent.values()) == {"bfloat16", "float32"}
    assert {name for name, dtype in sent.items() if dtype == "float32"} == biases.keys()
    write_model(config, checkpoint, tmp_path / "out", dtype=torch.bfloat16)
    assert tensor_shapes(tmp_path / "out") == tensor_shapes(tmp_path / "start")
    found, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for name, each in stored_state(found):
        assert torch.equal(each, biases[name] if name in biases else trained[name].bfloat16()), name
    weights = dict(start.named_parameters())
    assert all(not torch.equal(trained[name], each) for name, each in weights.items() if "experts" in name)


def test_an_export_of_a_model_that_names_no_type_has_that_of_its_tensors(tmp_path: Path) -> None:
    start = save_words(save_policy(tmp_path / "start"))
    file, described = start / "model.safetensors", start / "config.json"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    fields = json.loads(described.read_text())
    described.write_text(json.dumps({key: value for key, value in fields.items() if "dtype" not in key}))
    config, checkpoint, _ = saved_after_a_step(start, tmp_path / "run")
    write_model(config, checkpoint, tmp_path / "out")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    _, checkpoint, _ = saved_after_a_step(save_words(save_policy(tmp_path / "start")), tmp_path / "run")
    larger = AutoConfig.from_pretrained(tmp_path / "start")
    larger.num_hidden_layers, larger.layer_types = 3, ["full_attention"] * 3
    Qwen2ForCausalLM(larger).save_pretrained(save_words(tmp_path / "larger"))  # its first files can still be filled
    config = make_config(tmp_path / "larger", num_workers=1)
    with pytest.raises(CheckpointError, match=r"does not fit the model .*layers\.2\."):
        write_model(config, checkpoint, tmp_path / "out" / "model", max_shard_bytes=9_000)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_run_without_a_checkpoint_is_refused_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("defaults: [/arithmetic_grpo, _self_]")
    outcome = parity("export", "run", "out", cwd=tmp_path, watched=HEAVY)
    assert (outcome.code, outcome.loaded, outcome.out) == (2, (), "")
    assert outcome.err.splitlines() == [
        "parity export: 1 problem, nothing was started",
        "  - run holds no checkpoint. A run saves them with checkpoint.every=<steps>.",
    ]
    assert not (tmp_path / "out").exists()


def test_an_export_needs_no_file_of_the_run_but_those_of_the_model_wherever_it_lies_now(tmp_path: Path) -> None:
    start = save_words(save_policy(tmp_path / "start"))
    _, _, trained = saved_after_a_step(start, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(
        "defaults: [/gsm8k_grpo_qwen2.5_0.5b, _self_]\nmodel: {path: models/mine}\n"
        "data: {train_path: gone.jsonl, eval_path: data/gone-*.jsonl}\neval: {sets: {hard: gone.jsonl}}\n"
        "reward: {function: gone.py:reward}\nepisode: {function: gone.py:turns}\n"
    )
    words = ("export", "run", "out")
    refused = parity(*words, cwd=tmp_path, env={"HF_HUB_OFFLINE": "1"})
    assert refused.code == 2 and "got 'models/mine'. model.path=DIR" in refused.err, refused.err
    assert "gone" not in refused.err
    assert "parity export: 1 problem" in refused.err and not (tmp_path / "out").exists()
    outcome = parity(*words, "model.path=start", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert all(torch.equal(exported[name], trained[name]) for name in exported)


def test_other_files_than_those_of_the_start_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The weights of a run that trained all of them need no others, but an export also has a tokenizer and its like."""
    start = save_words(save_policy(tmp_path / "start"))
    config, checkpoint, _ = saved_after_a_step(start, tmp_path / "run")
    checkpoint = replace(checkpoint, state=replace(checkpoint.state, model_mark=model_mark(start)))
    write_model(config, checkpoint, tmp_path / "same")
    assert "began with" not in caplog.text
    file = start / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    write_model(config, checkpoint, tmp_path / "other")
    assert f"{start} does not hold the weights that the run of {checkpoint.path} began with" in caplog.text


class Evil:
    """An object whose pickle makes a directory when it is read."""

    def __init__(self, owned: Path) -> None:
        self.owned = owned

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.owned),)


def index_that_runs_code(policy: Path, owned: Path) -> None:
    (policy / ".metadata").write_bytes(pickle.dumps(Evil(owned)))


def value_that_runs_code(policy: Path, owned: Path) -> None:
    """The index says that a weight is no tensor; torch would unpickle what stands in its place."""
    index = dcp.FileSystemReader(policy).read_metadata()
    name = next(name for name in index.state_dict_metadata if name.startswith("policy.model."))
    for key in [key for key in index.storage_data if key.fqn == name]:
        del index.storage_data[key]
    torch.save(Evil(owned), policy / "evil.distcp")
    index.state_dict_metadata[name] = BytesStorageMetadata()
    size = (policy / "evil.distcp").stat().st_size
    index.storage_data[MetadataIndex(name)] = _StorageInfo("evil.distcp", 0, size)
    (policy / ".metadata").write_bytes(pickle.dumps(index))


def index_that_leads_out(policy: Path, owned: Path) -> None:
    index = dcp.FileSystemReader(policy).read_metadata()
    for stored in index.storage_data.values():
        stored.relative_path = f"../../{stored.relative_path}"
    (policy / ".metadata").write_bytes(pickle.dumps(index))


class EarlyPython(pickle.Pickler):
    """Writes members of enums as Python 3.11.2 does."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def rewrite_as_early_python(policy: Path) -> bytes:
    written = io.BytesIO()
    EarlyPython(written).dump(dcp.FileSystemReader(policy).read_metadata())
    (policy / ".metadata").write_bytes(written.getvalue())
    return written.getvalue()


def test_a_checkpoint_of_an_early_python_3_11_can_be_read(tmp_path: Path) -> None:
    start = save_policy(tmp_path / "start")
    with lone_worker(make_config(start, num_workers=1), start) as worker:
        worker.save_checkpoint(tmp_path / "saved", asynchronous=False)
        assert b"getattr" in rewrite_as_early_python(tmp_path / "saved")
        worker.load_checkpoint(tmp_path / "saved", 1)


class Member:
    """An object whose pickle takes a function out of a class of the index."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, str]]:
        return getattr, (Metadata, "__init__")


def index_that_asks_for_a_member(policy: Path, owned: Path) -> None:
    (policy / ".metadata").write_bytes(pickle.dumps(Member()))


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (index_that_asks_for_a_member, r"\.metadata is not the index .*: it asks for __init__ of something else"),
        (index_that_runs_code, r"\.metadata is not the index .*: it names posix\.mkdir, which could run code"),
        (value_that_runs_code, r"the value of policy\.model\.\S+ is no data"),
        (index_that_leads_out, r"\.metadata is not the index .*: it leads out of the checkpoint"),
    ],
)
def test_a_checkpoint_of_a_stranger_runs_no_code(
    tmp_path: Path, tamper: Callable[[Path, Path], None], reason: str
) -> None:
    """Its manifest agrees with its files: whoever makes a checkpoint makes the manifest too."""
    start, run_dir, owned = save_words(save_policy(tmp_path / "start")), tmp_path / "run", tmp_path / "owned"
    config = make_config(start, num_workers=1)
    with lone_worker(config, start) as worker:
        unfinished = begin_checkpoint(run_dir, 1)
        worker.save_checkpoint(unfinished / POLICY, asynchronous=False)
        tamper(unfinished / POLICY, owned)
        stream = StreamState(seed=0, epoch=0, position=0, digest="")
        path = commit_checkpoint(unfinished, RunState(step=1, policy_version=1, stream=stream), keep=2).path
        with pytest.raises(CheckpointError, match=reason):  # parity resume
            worker.load_checkpoint(path / POLICY, 1)
    with pytest.raises(CheckpointError, match=reason):
        export_model(config, run_dir, tmp_path / "out")
    source = WeightsSource(kind=SourceKind.checkpoint, path=path)
    with pytest.raises(CheckpointError, match=reason):
        checkpoint = checkpoint_of(config, source)
        evaluate_model(config, source, checkpoint=checkpoint, run_dir=tmp_path / "eval", say=lambda text: None)
    assert not owned.exists()
