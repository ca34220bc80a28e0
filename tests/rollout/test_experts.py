"""Experts between files, model and engine: names, bytes, shares of ranks. Tensors are made and taken apart by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from policy_cases import save_words
from safetensors.torch import load_file, save_file
from tiny_model import BIASED, EXPERTS_PER_TOKEN, MIXTURES, NUM_EXPERTS, SERVED, write_tiny_model

from rollout.sglang.config import SGLangConfig
from rollout.sglang.fusing import Share
from rollout.sglang.loader import _expert_by_expert
from rollout.weights.experts import sources
from rollout.weights.files import tensor_shapes
from rollout.weights.fusion import plan_fusion
from rollout.weights.packed_weights import stored_state
from trainer.limits.model_shape import directory_shape
from trainer.models.directory import find_model
from trainer.policy.model import check_files
from trainer.policy.stored import stored_tensors

FUSED = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture(params=MIXTURES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_rows_of_the_files_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, model_type=family)
    held = stored_tensors(tmp_path)
    parameters = dict(stored_state(model))
    assert held.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert held[name].shape() == parameter.shape
        assert torch.equal(held[name].rows(0, len(parameter)), parameter), name
        assert torch.equal(held[name].rows(2, 5), parameter[2:5]), name
    check_files(tmp_path)


def test_an_expert_that_is_not_in_the_files_is_a_tensor_that_they_lack(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model_type="qwen3_moe")
    names = list(tensor_shapes(tmp_path))
    lost = "model.layers.0.mlp.experts.3.up_proj.weight"
    assert FUSED in sources(names)
    assert FUSED not in sources(set(names) - {lost})


def test_a_token_meets_the_experts_that_are_chosen_for_it(family: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, model_type=family)
    sizes = {name: parameter.numel() for name, parameter in stored_state(model)}
    shape = directory_shape(tmp_path)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert shape.num_parameters == sum(sizes.values())
    if family == "deepseek_v3":
        assert shape.attention_size == 4 * 32 and shape.kv_size == 2 * 4 * 32  # 16 features of a key have positions
    assert shape.idle_parameters == experts * (NUM_EXPERTS - EXPERTS_PER_TOKEN) // NUM_EXPERTS
    ends = sizes["lm_head.weight"] + sizes["model.embed_tokens.weight"]
    assert shape.body_parameters == shape.num_parameters - ends - shape.idle_parameters


@pytest.mark.parametrize("family", BIASED)
def test_layers_that_predict_further_tokens_are_left_out(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model_type=family)
    save_words(tmp_path)
    shape, file = directory_shape(tmp_path), tmp_path / "model.safetensors"
    behind = {name.replace("layers.2", "layers.3"): each for name, each in load_file(file).items()}
    save_file(load_file(file) | behind | {"model.layers.3.eh_proj.weight": torch.ones(4, 4)}, file, {"format": "pt"})
    assert "another number of layers" in str(find_model("model.path", str(tmp_path), None))
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_model("model.path", str(tmp_path), None) == tmp_path
    assert directory_shape(tmp_path) == shape
    check_files(tmp_path)


def test_sizes_follow_from_config_json_alone(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model_type="qwen3_moe")
    stored = directory_shape(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert directory_shape(tmp_path) == stored


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_of_an_engine_hold_features_of_every_expert(size: int) -> None:
    gate, up, down = (torch.randn(3, *shape) for shape in ((4, 6), (4, 6), (6, 4)))
    whole = torch.cat([gate, up], dim=1)
    for rank in range(size):
        own, features = Share(rank=rank, size=size), slice(rank * 4 // size, (rank + 1) * 4 // size)
        assert torch.equal(own.of(FUSED, whole), torch.cat([gate[:, features], up[:, features]], dim=1))
        assert torch.equal(own.of(FUSED.replace("gate_up", "down"), down), down[:, :, features])


def test_an_engine_gets_the_matrices_that_it_knows() -> None:
    class Served(torch.nn.Module):
        """Parameters under the names of SGLang's Mixtral, or of its others."""

        def __init__(self, block: str) -> None:
            super().__init__()
            self.held = torch.nn.ParameterDict({f"layers_0_{block}": torch.nn.Parameter(torch.zeros(1))})

        def named_parameters(self, *args: object, **kwargs: object):  # type: ignore[no-untyped-def]
            return ((name.replace("_", ".", 2), each) for name, each in super().named_parameters())

    tensor = torch.randn(2, 8, 6)
    got = dict(_expert_by_expert(Served("mlp"), [(FUSED, tensor), ("model.norm.weight", tensor)]))
    assert list(got) == [
        *(f"model.layers.0.mlp.experts.{e}.{part}_proj.weight" for e in range(2) for part in ("gate", "up")),
        "model.norm.weight",
    ]
    assert torch.equal(got["model.layers.0.mlp.experts.1.up_proj.weight"], tensor[1, 4:])


@pytest.mark.parametrize("family", SERVED)
def test_engine_parameters_are_made_of_the_models(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model_type=family)
    sent = sources(tensor_shapes(tmp_path))
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    first, layers = (1, range(3)) if family in BIASED else (0, range(2))
    held = [name for name in sent if "_proj" not in name and not name.endswith(".gate.weight")]
    held += [f"model.layers.{layer}.{block}.gate.weight" for layer in layers[first:]]
    held += [f"model.layers.{layer}.{block}.experts.{w}_weight" for layer in layers[first:] for w in ("w13", "w2")]
    held += [f"model.layers.{layer}.self_attn.{name}.weight" for layer in layers for name in ("qkv_proj", "o_proj")]
    if family == "qwen2_moe":
        held += [f"model.layers.{layer}.self_attn.qkv_proj.bias" for layer in layers]
    shared = {"qwen2_moe": "shared_expert.", "glm4_moe": "shared_experts."}.get(family)
    dense = [f"{layer}.mlp." for layer in layers[:first]]
    for mlp in dense + [f"{layer}.mlp.{shared}" for layer in layers[first:] if shared]:
        held += [f"model.layers.{mlp}{name}_proj.weight" for name in ("gate_up", "down")]
    fusion = plan_fusion(held, sent=sent)
    assert fusion.sources[f"model.layers.1.{block}.experts.w13_weight"] == ("model.layers.1.mlp.experts.gate_up_proj",)
    assert fusion.sources[f"model.layers.1.{block}.gate.weight"] == ("model.layers.1.mlp.gate.weight",)


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model_type="qwen3_moe")
    save_words(tmp_path)
    assert find_model("model.path", str(tmp_path), None) == tmp_path
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"qwen3_moe"', '"dots1"'))
    assert "mixture of experts of one of the families deepseek_v3" in str(find_model("model.path", str(tmp_path), None))
    rule = SGLangConfig().model_rule
    assert "another family" in rule({"model_type": "deepseek_v3"})
    assert rule({"model_type": "glm4_moe", "first_k_dense_replace": 1}) == ""
    assert "experts in every layer" in rule({"model_type": "qwen3_moe", "mlp_only_layers": [1]})
    assert "head of its own" in rule({"model_type": "qwen3_moe", "tie_word_embeddings": True})
    assert "norm_topk_prob" in rule({"model_type": "olmoe", "norm_topk_prob": True})
    assert rule({"model_type": "qwen3_moe"}) == rule({"model_type": "qwen3", "tie_word_embeddings": True}) == ""
