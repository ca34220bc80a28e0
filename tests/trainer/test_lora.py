"""LoRA: adapters of peft on a sharded policy; frozen weights, published weights, checkpoints, the reference."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from gathering_ranks import published_by_ranks
from huggingface_hub import constants
from policy_cases import (
    full_gradient,
    lone_worker,
    make_config,
    make_samples,
    move_adapter,
    save_policy,
    save_untied,
    save_words,
)
from test_gathering import save_odd
from test_packing import pack_samples
from tiny_model import write_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from algorithms.config import ConfigError
from rollout.config import DType
from rollout.data.dataset import StreamState
from rollout.torch.config import TorchEngineConfig
from rollout.types import Sample
from rollout.weights.adapter import is_adapter
from rollout.weights.files import tensor_shapes as stored_shapes
from rollout.weights.packed_weights import DTYPES
from trainer.config.train import TrainConfig
from trainer.config.training import HFModelConfig, LoraConfig, SmolLM2ModelConfig
from trainer.limits.adapter_shape import adapter_parameters, linear_shapes, stored_linear_shapes
from trainer.limits.floors import GroupLengths, training_flops
from trainer.limits.model_shape import SMOLLM2, described_shapes, shape_of
from trainer.models.adapter import AdapterFacts, read_adapter
from trainer.models.export import write_adapter, write_merged, write_model
from trainer.policy.checkpoint_reader import DataReader
from trainer.policy.lora import NoAdapterError
from trainer.policy.model import full_tensors, tensor_shapes
from trainer.policy.worker import PolicyWorker
from trainer.rundir.checkpoint import (
    POLICY,
    Checkpoint,
    CheckpointError,
    RunState,
    begin_checkpoint,
    commit_checkpoint,
)
from trainer.rundir.model_mark import model_mark
from trainer.rundir.resume import flat_config, other_run
from trainer.start.task_check import task_problems


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


def with_lora(model_path: Path, *, num_workers: int = 1, dtype: DType = DType.float32, **lora: object) -> TrainConfig:
    config = make_config(model_path, num_workers=num_workers)
    keys = {"rank": 4, "alpha": 8.0} | lora
    return replace(config, policy=replace(config.policy, lora=LoraConfig(**keys), dtype=dtype))  # type: ignore[arg-type]


def train(worker: PolicyWorker, step: int) -> None:
    batch = pack_samples([make_samples()], num_ranks=1, max_tokens=40, policy_version=0)
    worker.train(batch.ranks[0], batch.samples, step)


def adapter(worker: PolicyWorker) -> dict[str, Tensor]:
    worker._policy.model.reshard()  # type: ignore[operator]  # after a forward alone the root is still gathered
    parameters = worker._policy.model.causal_lm.named_parameters()
    return {name: each.detach().full_tensor().clone() for name, each in parameters if is_adapter(name)}  # type: ignore[union-attr]


def frozen(worker: PolicyWorker) -> dict[str, Tensor]:
    worker._policy.model.reshard()  # type: ignore[operator]  # after a forward alone the root is still gathered
    parameters = worker._policy.model.causal_lm.named_parameters()
    return {name: each.detach().full_tensor().clone() for name, each in parameters if not is_adapter(name)}  # type: ignore[union-attr]


def peft_model(path: Path, tensors: dict[str, Tensor], *, rank: int = 4, alpha: float = 8.0) -> peft.PeftModel:
    """The same model and adapter in peft, without anything of Parity."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    own = dict(model.named_parameters())
    for name, tensor in tensors.items():
        own[f"base_model.model.{name}"].data.copy_(tensor)
    assert sum(map(is_adapter, own)) == len(tensors)
    return model


def peft_logprobs(model: torch.nn.Module, samples: list[Sample]) -> Tensor:
    """Log-probs of the response tokens of every sample, one after the other, with all logits in memory."""
    scored = []
    for sample in samples:
        tokens = torch.tensor(sample.token_ids)[None]
        logits = model(input_ids=tokens).logits[0, :-1].float()
        chosen = torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0]
        scored.append(chosen[torch.tensor(sample.response_mask)[1:]])
    return torch.cat(scored)


def test_scores_and_gradients_are_those_of_peft(model_path: Path) -> None:
    samples = make_samples()
    with lone_worker(with_lora(model_path), model_path) as worker:
        move_adapter(worker)
        plain = peft_model(model_path, adapter(worker))
        batch = pack_samples([samples], num_ranks=1, max_tokens=1000, policy_version=0)
        [micro] = batch.ranks[0][0].micro_batches
        scores = worker._policy.model(micro, temperature=1.0)
        worker._policy.zero_grad()
        worker._policy.backward(scores.logprobs[micro.response_index].mean())
        found = full_gradient(worker._policy.model)
        own = worker._policy.model.causal_lm.named_parameters()
        assert all((parameter.grad is not None) is is_adapter(name) for name, parameter in own)
    expected = peft_logprobs(plain, samples)
    expected.mean().backward()
    gradients = [parameter.grad.flatten() for parameter in plain.parameters() if parameter.grad is not None]
    torch.testing.assert_close(found, torch.cat(gradients), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        scores.logprobs[micro.response_index].sort().values, expected.sort().values, atol=1e-6, rtol=0
    )


def test_the_run_begins_with_the_model_itself(model_path: Path) -> None:
    with lone_worker(make_config(model_path, num_workers=1), model_path) as worker:
        base = dict(full_tensors(worker._policy.model))
    with lone_worker(with_lora(model_path), model_path) as worker:
        found = dict(full_tensors(worker._policy.model))
        drawn = adapter(worker)
    assert found.keys() == base.keys()
    assert all(torch.equal(found[name], base[name]) for name in base)
    assert all(tensor.any() == name.endswith("lora_A.default.weight") for name, tensor in drawn.items())
    with lone_worker(with_lora(model_path), model_path) as worker:
        assert all(torch.equal(tensor, drawn[name]) for name, tensor in adapter(worker).items())


def test_only_the_adapter_is_trained_and_published_weights_hold_it(model_path: Path) -> None:
    with lone_worker(with_lora(model_path), model_path) as worker:
        before = frozen(worker)
        train(worker, 1)
        train(worker, 2)
        assert all(torch.equal(tensor, before[name]) for name, tensor in frozen(worker).items())
        trained = adapter(worker)
        assert all(tensor.any() for tensor in trained.values())
        states = worker._policy._optimizer.state
        assert len(states) == len(trained)
        found = dict(full_tensors(worker._policy.model))
    merged = peft_model(model_path, trained).merge_and_unload()
    expected = dict(merged.named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name].detach(), atol=1e-7, rtol=1e-6)


def test_frozen_weights_take_the_type_of_the_forward(model_path: Path) -> None:
    with lone_worker(with_lora(model_path, dtype=DType.bfloat16), model_path) as worker:
        train(worker, 1)
        parameters = dict(worker._policy.model.causal_lm.named_parameters())
        kinds = {(is_adapter(name), each.dtype) for name, each in parameters.items()}
        assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
        found, trained = dict(full_tensors(worker._policy.model)), adapter(worker)
        shapes = {shape.name: shape.dtype for shape in tensor_shapes(worker._policy.model)}
        assert all(shapes[name] == tensor.dtype for name, tensor in found.items())
    merged = peft_model(model_path, trained)
    for name, parameter in merged.named_parameters():
        if not is_adapter(name):
            parameter.data.copy_(parameter.data.bfloat16())
    expected = dict(merged.merge_and_unload().named_parameters())
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.float(), expected[name].detach(), atol=1e-7, rtol=1e-6)


def test_the_reference_is_the_policy_without_its_adapter(model_path: Path) -> None:
    config = with_lora(model_path)
    config.reference.coef = 0.1
    batch = pack_samples([make_samples()], num_ranks=1, max_tokens=1000, policy_version=0)
    micros = batch.ranks[0][0].micro_batches
    with lone_worker(make_config(model_path, num_workers=1), model_path) as worker:
        [base] = worker.logprobs(micros)
    with lone_worker(config, model_path) as worker:
        assert worker._reference is None
        train(worker, 1)
        moved = worker.logprobs(micros)[0]
        worker._training.fill_ref_logprobs(batch.ranks[0], worker._training._reference)
        assert torch.equal(micros[0].ref_logprobs.cpu(), base)
        assert torch.equal(worker.logprobs(micros)[0], moved) and not torch.equal(moved, base)


def test_a_checkpoint_holds_the_adapter_and_goes_on_bit_for_bit(model_path: Path, tmp_path: Path) -> None:
    config = with_lora(model_path)
    batch = pack_samples([make_samples()], num_ranks=1, max_tokens=1000, policy_version=0)
    micros = batch.ranks[0][0].micro_batches
    (tmp_path / "saved").mkdir()
    with lone_worker(config, model_path) as worker:
        train(worker, 1)
        worker.save_checkpoint(tmp_path / "saved", False)
        report = worker.saved_checkpoint(True)
        assert report is not None and report.error is None
        train(worker, 2)
        expected, own = worker.logprobs(micros)[0], adapter(worker)
    stored = DataReader(tmp_path / "saved").read_metadata().state_dict_metadata
    weights = {name.removeprefix("policy.model.causal_lm.") for name in stored if name.startswith("policy.model.")}
    assert weights == own.keys()
    with lone_worker(config, model_path) as worker:
        assert worker.load_checkpoint(tmp_path / "saved", 1)
        train(worker, 2)
        assert torch.equal(worker.logprobs(micros)[0], expected)
        assert all(torch.equal(tensor, own[name]) for name, tensor in adapter(worker).items())


@pytest.mark.parametrize(
    ("targets", "names"),
    [("attention", {"q_proj", "k_proj", "v_proj", "o_proj"}), (r".*\.1\..*(up|down)_proj", {"up_proj", "down_proj"})],
)
def test_targets_choose_layers(tmp_path: Path, targets: str, names: set[str]) -> None:
    path = save_untied(tmp_path)
    with lone_worker(with_lora(path, targets=targets), path) as worker:
        found = {name.split(".lora_")[0] for name in adapter(worker)}
    assert {name.rpartition(".")[2] for name in found} == names
    assert len(found) == (len(names) * 3 if targets == "attention" else len(names))


def test_targets_of_no_layer_are_refused(model_path: Path) -> None:
    with (
        pytest.raises(NoAdapterError, match=r"policy\.lora\.targets=c_attn"),
        lone_worker(with_lora(model_path, targets="c_attn"), model_path),
    ):
        pass


@pytest.mark.parametrize("num_ranks", [3])
def test_several_ranks_draw_and_publish_what_one_does(tmp_path: Path, num_ranks: int) -> None:
    path = save_odd(tmp_path, tied=True)
    engines = {name: TorchEngineConfig(dtype=DType[name]) for name in ("float32", "bfloat16")}
    one, several = (
        published_by_ranks(with_lora(path, num_workers=number, merge=True), path, engines, bucket_bytes=10_000)
        for number in (1, num_ranks)
    )
    for name in engines:
        found, expected = several[name][0], one[name][0]
        assert [(each.name, each.shape) for each in found.tensors] == [(e.name, e.shape) for e in expected.tensors]
        for each in found.tensors:
            numbers = [
                torch.frombuffer(weights.data, dtype=DTYPES[name], offset=each.offset, count=math.prod(each.shape))
                for weights in (found, expected)
            ]
            # The product of a few rows of B with A may round in another order.
            torch.testing.assert_close(*numbers, atol=1e-6 if name == "float32" else 2e-3, rtol=0)


def test_several_ranks_publish_the_adapter_and_the_frozen_weights_that_one_does(tmp_path: Path) -> None:
    path = save_odd(tmp_path, tied=True)
    engines = {name: TorchEngineConfig(dtype=DType[name]) for name in ("float32", "bfloat16")}
    one, several = (
        published_by_ranks(with_lora(path, num_workers=number), path, engines, bucket_bytes=10_000) for number in (1, 3)
    )
    for name in engines:
        found, expected = several[name][0], one[name][0]
        assert found.base is not None
        assert expected.base is not None
        assert found.tensors == expected.tensors  # names, places and digests
        assert {each.name.rpartition(".lora_")[2] for each in found.tensors} == {"A.weight", "B.weight"}
        assert found.base.tensors == expected.base.tensors
        assert {each.name for each in found.base.tensors} == stored_shapes(path).keys()


def saved_run(path: Path, run_dir: Path) -> tuple[TrainConfig, Checkpoint, dict[str, Tensor]]:
    """A checkpoint of a LoRA run after a step, and the weights that the engines would get."""
    save_words(path)
    config = with_lora(path, targets="attention")
    with lone_worker(config, path) as worker:
        train(worker, 1)
        unfinished = begin_checkpoint(run_dir, 1)
        worker.save_checkpoint(unfinished / POLICY, asynchronous=False)
        merged = {name: tensor.clone() for name, tensor in full_tensors(worker._policy.model)}
    stream = StreamState(seed=0, epoch=0, position=0, digest="")
    state = RunState(step=1, policy_version=1, stream=stream, config=flat_config(config), model_mark=model_mark(path))
    return config, commit_checkpoint(unfinished, state, keep=1), merged


@pytest.mark.parametrize("save", [save_policy, save_untied], ids=["tied", "several files"])
def test_an_export_is_merged_or_an_adapter_that_peft_loads(tmp_path: Path, save: Callable[[Path], Path]) -> None:
    config, checkpoint, merged = saved_run(save(tmp_path / "start"), tmp_path / "run")
    write_model(config, checkpoint, tmp_path / "merged", dtype=torch.float32)
    write_adapter(config, checkpoint, tmp_path / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    found = dict(whole.named_parameters())
    assert found.keys() == merged.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.detach(), merged[name], atol=1e-7, rtol=0)
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert sorted(described["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert described["base_model_name_or_path"] == config.model.path  # type: ignore[attr-defined]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(loaded(tokens).logits, whole(tokens).logits, atol=1e-5, rtol=0)
    assert not torch.allclose(loaded(tokens).logits, loaded.unload()(tokens).logits, atol=1e-3)


def test_an_adapter_names_its_model_for_readers_in_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is of no use elsewhere, and the newest revision of a hub model may be of other weights."""
    config, checkpoint, _ = saved_run(save_policy(tmp_path / "start"), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    write_adapter(replace(config, model=HFModelConfig(path="start")), checkpoint, tmp_path / "adapter")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached, commit = tmp_path / "hub" / "models--some--model", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree("start", cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "v1").write_text(commit)
    of_hub = HFModelConfig(path="some/model", revision="v1")
    write_adapter(replace(config, model=of_hub), checkpoint, tmp_path / "of_hub")
    described = json.loads((tmp_path / "of_hub" / "adapter_config.json").read_text())
    assert (described["base_model_name_or_path"], described["revision"]) == ("some/model", "v1")
    monkeypatch.chdir("/")
    assert peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").active_adapters == ["default"]


def test_an_adapter_of_another_model_or_kind_is_refused(tmp_path: Path) -> None:
    config, checkpoint, merged = saved_run(save_untied(tmp_path / "start"), tmp_path / "run")
    write_adapter(config, checkpoint, tmp_path / "adapter")
    shapes = stored_linear_shapes(tmp_path / "start")
    facts = read_adapter("checkpoint", tmp_path / "adapter", shapes)
    assert isinstance(facts, AdapterFacts) and (facts.rank, facts.alpha) == (4, 8)
    write_merged(config, tmp_path / "adapter", tmp_path / "merged", dtype=torch.float32)
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).named_parameters())
    assert all(torch.allclose(tensor.detach(), merged[name], atol=1e-7) for name, tensor in found.items())
    other = stored_linear_shapes(save_policy(tmp_path / "other"))
    assert "which has no linear layer model.layers.2." in str(read_adapter("checkpoint", tmp_path / "adapter", other))
    wide = {name: (size[0] + 1, size[1]) for name, size in shapes.items()}
    assert "k_proj has shape [17, 32], the adapter is for [16, 32]" in str(
        read_adapter("checkpoint", tmp_path / "adapter", wide)
    )
    wrong = replace(checkpoint, state=replace(checkpoint.state, model_mark="0"))
    with pytest.raises(CheckpointError, match="holds an adapter of other weights than those in"):
        write_model(config, wrong, tmp_path / "never")
    with pytest.raises(CheckpointError, match="holds an adapter of other weights than those in"):
        write_adapter(config, wrong, tmp_path / "never")
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    for key, value in (("use_dora", True), ("init_lora_weights", "pissa"), ("alora_invocation_tokens", [3])):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(described | {key: value}))
        problem = str(read_adapter("checkpoint", tmp_path / "adapter", shapes))
        assert problem.startswith(f"checkpoint must be a plain LoRA adapter, without {key}={value}, got ")
    for key, value, words in (
        ("r", 8, "must hold matrices of the rank r=8 in adapter_config.json, not of [4]"),
        ("target_modules", ["c_attn"], "must name its layers in target_modules of adapter_config.json, which leaves"),
        ("target_modules", ".*layers.0.self_attn.*", "which leaves out model.layers.1.self_attn"),
    ):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(described | {key: value}))
        assert words in str(read_adapter("checkpoint", tmp_path / "adapter", shapes))
    for good in ("all-linear", ".*_proj"):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(described | {"target_modules": good}))
        assert isinstance(read_adapter("checkpoint", tmp_path / "adapter", shapes), AdapterFacts)
    assert isinstance(
        read_adapter("checkpoint", tmp_path / "adapter", shapes, mark=model_mark(tmp_path / "start")), AdapterFacts
    )
    assert "must be of these weights" in str(read_adapter("checkpoint", tmp_path / "adapter", shapes, mark="0"))


def state_of(config: dict[str, object]) -> RunState:
    stream = StreamState(seed=0, epoch=0, position=0, digest="")
    return RunState(step=1, policy_version=1, stream=stream, config=config)


def test_a_checkpoint_of_another_adapter_is_another_run(model_path: Path) -> None:
    def problems(saved: TrainConfig, now: TrainConfig) -> list[str]:
        return [str(problem) for problem in other_run(Path("step_1"), state_of(flat_config(saved)), now)]

    plain, lora = make_config(model_path, num_workers=1), with_lora(model_path)
    assert not problems(lora, lora) and not problems(plain, plain)
    [text] = problems(lora, with_lora(model_path, rank=8))
    assert (
        text.startswith("policy.lora.rank must be 4, as in step_1, which holds an adapter: with")
        or "an adapter" in text
    )
    assert any("policy.lora.rank must be 4" in text for text in problems(lora, plain))
    [*_, text] = problems(plain, with_lora(model_path, alpha=32))
    assert "policy.lora.rank must be 0, as in step_1, which holds all weights" in text
    old = {key: value for key, value in flat_config(plain).items() if not key.startswith("policy.lora")}
    assert not list(other_run(Path("step_1"), state_of(old), plain))


def test_an_adapter_that_does_not_fit_is_refused_before_a_start(tmp_path: Path) -> None:
    path = save_untied(tmp_path)

    def problems(**lora: object) -> list[str]:
        return [str(each) for each in task_problems([with_lora(path, **lora)]) if each.key.startswith("policy.lora")]

    assert not problems() and not problems(targets="attention") and not problems(rank=16)
    [text] = problems(rank=17)
    assert text.startswith("policy.lora.rank must be at most 16 for model.layers.0.self_attn.k_proj [16, 32], got 17.")
    assert "5 more layers are as small" in text
    [text] = problems(targets="c_attn")
    assert "policy.lora.targets must be the name of a linear layer of the model's blocks, got 'c_attn'." in text
    assert "ends: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj." in text
    with pytest.raises(ConfigError, match=r"must be all, attention or a regular expression, got '\('"):
        LoraConfig(rank=4, targets="(").check()


def test_dense_layers_of_a_mixture_take_no_adapter(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model_type="glm4_moe")

    def problems(**lora: object) -> list[str]:
        return [
            str(each) for each in task_problems([with_lora(tmp_path, **lora)]) if each.key.startswith("policy.lora")
        ]

    assert "layers without experts, such as model.layers.0.mlp." in problems()[0]
    assert not problems(targets="attention")


def test_sizes_of_the_built_in_models_are_those_of_their_files(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3,
    )  # fmt: skip
    with torch.device("meta"):
        linear = {n: tuple(m.weight.shape) for n, m in Qwen2ForCausalLM(config).named_modules() if hasattr(m, "weight")}
    expected = {name: shape for name, shape in linear.items() if ".layers." in name and len(shape) == 2}
    run = replace(make_config(tmp_path), model=SmolLM2ModelConfig())
    assert linear_shapes(run) == expected
    lora = LoraConfig(rank=16)
    assert adapter_parameters(expected, lora) == 16 * sum(map(sum, expected.values())) == 4_884_480


def test_frozen_weights_cost_four_instead_of_six() -> None:
    shape, groups = shape_of(SMOLLM2, described_shapes(SMOLLM2)), [GroupLengths(0, (10,), 10)]
    full, frozen_flops = training_flops(shape, groups), training_flops(shape, groups, adapter=1000)
    assert full - frozen_flops == 2.0 * shape.matrix_parameters * 10 - 6.0 * 1000 * 10
