"""A rank's own rows from the files: the same bits as the whole model, tied weights, computed buffers, clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from policy_cases import full_gradient, lone_worker, make_config, make_samples, save_policy, save_untied
from safetensors.torch import load_file, save_file
from test_packing import pack_samples
from transformers import ApertusConfig, AutoModelForCausalLM

from algorithms.config import AdvantageConfig, Estimator
from trainer.batch.packing import micro_batch
from trainer.policy.model import check_files, empty_causal_lm, full_tensors, load_causal_lm
from trainer.policy.stored import weight_files
from trainer.scoring.attention import Segments


def test_a_buffer_without_a_dimension_is_read(tmp_path: Path) -> None:
    """The activation of Apertus has two numbers of its own in each layer."""
    config = ApertusConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    changed = {name: each + 1 if each.dim() == 0 else each for name, each in tensors.items()}
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with lone_worker(make_config(tmp_path, num_workers=1), tmp_path) as worker:
        buffers = dict(worker._policy.model.causal_lm.named_buffers())
    read = [name for name, each in changed.items() if each.dim() == 0]
    assert len(read) == 4 and all(torch.equal(buffers[name], changed[name].to(buffers[name])) for name in read)


@pytest.mark.parametrize("tied", [True, False])
def test_shards_have_the_bits_of_the_whole_model(tmp_path: Path, tied: bool) -> None:
    path = save_policy(tmp_path) if tied else save_untied(tmp_path)
    whole = load_causal_lm(path)
    samples = make_samples()[:4]
    for sample in samples:
        sample.token_ids = sample.token_ids % 50
    with lone_worker(make_config(path, num_workers=1), path) as worker:
        model = worker._policy.model
        loaded = dict(full_tensors(model))
        expected = dict(whole.named_parameters())
        assert loaded.keys() == expected.keys()
        assert all(loaded[name].dtype == torch.float32 for name in loaded)
        assert all(torch.equal(loaded[name], expected[name]) for name in loaded)
        buffers, expected_buffers = dict(model.causal_lm.named_buffers()), dict(whole.named_buffers())
        assert buffers.keys() == expected_buffers.keys()
        assert all(torch.equal(buffers[name], expected_buffers[name]) for name in buffers)
        head, embedding = model.causal_lm.get_output_embeddings(), model.causal_lm.get_input_embeddings()
        assert (head.weight is embedding.weight) is tied
        [logprobs] = worker.logprobs([micro_batch(samples)])
        assert (head.weight is embedding.weight) is tied
        micro = micro_batch(samples)
        tokens = micro.token_ids[: int(micro.cu_seqlens[1])]
        with torch.no_grad():
            logits = whole(
                tokens[None],
                segments=Segments([len(tokens)]),
                position_ids=torch.arange(len(tokens))[None],
                use_cache=False,
            ).logits[0]
        scored = torch.log_softmax(logits[:-1], -1).gather(-1, tokens[1:, None])[:, 0]
        mask = micro.response_mask[1 : len(tokens)]
        assert mask.any()
        assert torch.allclose(logprobs[1 : len(tokens)][mask], scored[mask], atol=1e-5)


@pytest.mark.parametrize("pad", [5, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_the_token_of_the_padding_learns_as_any_other(tmp_path: Path, tied: bool, pad: int) -> None:
    """As SmolLM2 has it: the padding token also ends every response, begins every sequence and stands in prompts."""
    samples = make_samples()
    for sample in samples:
        sample.token_ids %= 4
        sample.token_ids[[0, 1, -1]] = 5
    gradients = []
    for name, ids in (("none", {}), ("pad", {"pad_token_id": pad, "eos_token_id": 5, "bos_token_id": 5})):
        path = save_policy(tmp_path / name) if tied else save_untied(tmp_path / name)
        described = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(described | {"pad_token_id": None} | ids))
        advantage = AdvantageConfig(estimator=Estimator.gae)
        config = make_config(path, num_workers=1, advantage=advantage, mini_batch_prompts=4)
        batch = pack_samples([samples], num_ranks=1, max_tokens=1000, policy_version=0)
        with lone_worker(config, path) as worker:
            worker.train(batch.ranks[0], batch.samples, 1)
            gradients.append([full_gradient(part.model) for part in worker._learnt().values()])
    for expected, found in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


def test_the_empty_model_holds_no_memory(tmp_path: Path) -> None:
    model = empty_causal_lm(save_policy(tmp_path))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_what_a_model_returns_by_its_config_is_not_what_a_rank_takes(tmp_path: Path) -> None:
    path = save_policy(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"return_dict": False}))
    tokens = torch.arange(5)[None]
    said = load_causal_lm(tmp_path).model(tokens, segments=Segments([5]), use_cache=False)
    assert said.last_hidden_state.shape == (1, 5, 32)


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path: Path) -> None:
    path = save_policy(tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: t for name, t in tensors.items() if "0.mlp.up" not in name}, file, metadata={"format": "pt"})
    with (
        pytest.raises(ValueError, match=r"lack parameters of the model: model\.layers\.0\.mlp\.up_proj\.weight"),
        lone_worker(make_config(path, num_workers=1), path),
    ):
        pass
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, file, metadata={"format": "pt"})
    with (
        pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[31\], the model wants \[32\]"),
        lone_worker(make_config(path, num_workers=1), path),
    ):
        pass


def test_tied_tensors_with_values_of_their_own_are_refused(tmp_path: Path) -> None:
    """transformers 5 keeps them apart, whatever config.json says, and a run would train another model."""
    path = save_policy(tmp_path)
    stored = load_file(path / "model.safetensors")
    head = stored["model.embed_tokens.weight"].clone()
    save_file(stored | {"lm_head.weight": head}, path / "model.safetensors", metadata={"format": "pt"})
    check_files(path)
    head[-1, -1] += 1
    save_file(stored | {"lm_head.weight": head}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        check_files(path)


def test_quantised_numbers_without_a_quantization_config_are_refused(tmp_path: Path) -> None:
    path = save_policy(tmp_path)
    stored, name = load_file(path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    save_file(stored | {name: stored[name].bfloat16()}, path / "model.safetensors", metadata={"format": "pt"})
    check_files(path)
    for kind in (torch.int8, torch.float8_e4m3fn):
        save_file(stored | {name: stored[name].to(kind)}, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"{name} holds .*without their scales"):
            check_files(path)


def test_a_tensor_without_a_parameter_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_policy(tmp_path)
    file = path / "model.safetensors"
    save_file(load_file(file) | {"model.extra": torch.ones(2)}, file, metadata={"format": "pt"})
    with lone_worker(make_config(path, num_workers=1), path):
        assert "no parameter for: model.extra" in caplog.text


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(OSError, match=r"neither model\.safetensors nor"):
        weight_files(tmp_path)


def test_an_index_that_names_the_wrong_file_of_a_tensor_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    path, index = save_policy(tmp_path), tmp_path / "model.safetensors.index.json"
    load_causal_lm(path, attention=None).save_pretrained(path, max_shard_size="20KB")
    (path / "model.safetensors").unlink()
    expected, listed = weight_files(path), json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict(zip(listed, reversed(listed.values()), strict=True))}))
    assert weight_files(path) == expected
    assert {name: file.name for name, file in expected.items()} == listed
    check_files(path)


def test_an_index_that_a_later_save_left_behind_is_not_read(tmp_path: Path) -> None:
    path = save_policy(tmp_path)
    model, before = load_causal_lm(path, attention=None), weight_files(path)
    model.save_pretrained(path, max_shard_size="20KB")
    (path / "model.safetensors").unlink()
    assert len(set(weight_files(path).values())) > 1
    model.save_pretrained(path)
    assert (path / "model.safetensors.index.json").is_file(), "transformers removes the index now: so can this test be"
    assert weight_files(path) == before
    check_files(path)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/model.safetensors", "a/../../b.safetensors"])
def test_an_index_cannot_name_a_file_outside_the_model(tmp_path: Path, name: str) -> None:
    index = {"weight_map": {"model.norm.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"names the file '{name}', which is not in it"):
        weight_files(tmp_path)
