"""Experts between files, model and engine: names, bytes, shares of ranks. Tensors are made and taken apart by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from policy_cases import save_words
from tiny_model import EXPERTS_PER_TOKEN, MIXTURES, NUM_EXPERTS, write_tiny_model

from rollout.sglang.config import SGLangConfig
from rollout.sglang.fusing import Share, plan_fusion
from rollout.sglang.loader import _expert_by_expert
from rollout.weights.experts import sources
from rollout.weights.files import tensor_shapes
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
    parameters = dict(model.named_parameters())
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
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    shape = directory_shape(tmp_path)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert shape.num_parameters == sum(sizes.values())
    assert shape.idle_parameters == experts * (NUM_EXPERTS - EXPERTS_PER_TOKEN) // NUM_EXPERTS
    ends = sizes["lm_head.weight"] + sizes["model.embed_tokens.weight"]
    assert shape.body_parameters == shape.num_parameters - ends - shape.idle_parameters


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


def test_engine_parameters_are_made_of_the_models(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model_type=family)
    sent = sources(tensor_shapes(tmp_path))
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    held = [name for name in sent if "_proj" not in name and ".gate." not in name]
    held += [f"model.layers.{layer}.{block}.gate.weight" for layer in range(2)]
    held += [f"model.layers.{layer}.{block}.experts.{w}_weight" for layer in range(2) for w in ("w13", "w2")]
    held += [
        f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ("qkv_proj.weight", "o_proj.weight")
    ]
    if family == "qwen2_moe":
        held += [f"model.layers.{layer}.self_attn.qkv_proj.bias" for layer in range(2)]
        held += [
            f"model.layers.{layer}.mlp.shared_expert.{name}_proj.weight"
            for layer in range(2)
            for name in ("gate_up", "down")
        ]
    fusion = plan_fusion(held, sent=sent)
    assert fusion.sources[f"model.layers.1.{block}.experts.w13_weight"] == ("model.layers.1.mlp.experts.gate_up_proj",)
    assert fusion.sources[f"model.layers.1.{block}.gate.weight"] == ("model.layers.1.mlp.gate.weight",)


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model_type="qwen3_moe")
    save_words(tmp_path)
    assert find_model("model.path", str(tmp_path), None) == tmp_path
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"qwen3_moe"', '"dots1"'))
    assert "mixture of experts of one of the families mixtral" in str(find_model("model.path", str(tmp_path), None))
    rule = SGLangConfig().model_rule
    assert "experts in every layer" in rule({"model_type": "qwen3_moe", "mlp_only_layers": [1]})
    assert "head of its own" in rule({"model_type": "qwen3_moe", "tie_word_embeddings": True})
    assert "norm_topk_prob" in rule({"model_type": "olmoe", "norm_topk_prob": True})
    assert rule({"model_type": "qwen3_moe"}) == rule({"model_type": "qwen3", "tie_word_embeddings": True}) == ""
