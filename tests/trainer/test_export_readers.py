"""An export is what the run trained for every reader: transformers 4 and 5 compute the same, and stop where it did."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import make_config, save_policy, save_words
from readers import NEW_TOKENS, Reading, needs_release_4, read, read_with_release_4, write, write_with_release_4
from test_export import saved_after_a_step

from rollout.data.tokenizer import load_tokenizer
from trainer.models.config_files import copy_description, describe_tokenizer_for_release_4, release_4_note
from trainer.models.export import write_model
from trainer.rundir.run_dir import StartError

THETA = 300_000.0
"""A base that no family has by default."""
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 0,
    "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": LLAMA3},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "mistral": {"sliding_window": 16},
    "gemma": {"head_dim": 16},
    "phi3": {"partial_rotary_factor": 0.5},
    "qwen3_moe": {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 8},
}
"""Model type -> fields of its config beside SIZES and the base, in the names of transformers 4."""


def fields_of(family: str) -> dict[str, Any]:
    """The config of a family in the names of transformers 4."""
    return {"model_type": family, **SIZES, "rope_theta": THETA, **FAMILIES[family]}


def in_names_of_release_5(fields: dict[str, Any]) -> dict[str, Any]:
    """A config as people make it with transformers 5."""
    new = dict(fields)
    rope = {"rope_theta": new.pop("rope_theta"), **(new.pop("rope_scaling", None) or {"rope_type": "default"})}
    if "partial_rotary_factor" in new:
        rope["partial_rotary_factor"] = new.pop("partial_rotary_factor")
    return new | {"rope_parameters": rope}


def same(one: Reading, other: Reading) -> None:
    """Both releases compute the same."""
    assert one.release.split(".")[0] != other.release.split(".")[0]
    torch.testing.assert_close(one.log_probs, other.log_probs, atol=1e-5, rtol=0)
    assert one.generated == other.generated


def exported(start: Path, scratch: Path) -> Path:
    """The export of a run of one step from the model in `start`."""
    config, checkpoint, _ = saved_after_a_step(start, scratch / "run")
    write_model(config, checkpoint, scratch / "out", dtype=torch.float32)
    return scratch / "out"


@needs_release_4
def test_an_export_computes_the_same_for_transformers_4_and_5(tmp_path: Path) -> None:
    starts = {(family, release): tmp_path / family / release for family in FAMILIES for release in ("four", "five")}
    for path in starts.values():
        save_words(path)
    write_with_release_4({starts[name, "four"]: fields_of(name) for name in FAMILIES}, tmp_path)
    for family in FAMILIES:
        write(starts[family, "five"], in_names_of_release_5(fields_of(family)))
        assert "rope_theta" not in json.loads((starts[family, "five"] / "config.json").read_text())
    exports = [exported(start, start.with_name(f"{start.name}_export")) for start in starts.values()]
    for (family, release), start, export, found in zip(
        starts, starts.values(), exports, read_with_release_4(exports, tmp_path), strict=True
    ):
        here = read(export)
        same(found, here)
        before, after = (json.loads((path / "config.json").read_text()) for path in (start, export))
        assert after["rope_theta"] == THETA, family
        assert found.tokenizer == "PreTrainedTokenizerFast", "as `start` was saved by release 5"
        ends = {"eos_token_id": [1, 2]}  # that of the tokenizer, and that of the model
        assert json.loads((export / "generation_config.json").read_text())["eos_token_id"] == [1, 2]
        if release == "four":
            types = {name: "float32" for name in ("dtype", "torch_dtype") if name in before}
            assert after == before | types | {"torch_dtype": "float32"} | ends, "as it is"
        else:
            assert after.items() >= (before | ends).items()
            assert "rope_scaling" in after, "some families scale by default"


def edited(path: Path, **fields: object) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | fields))


def no_file(start: Path) -> None:
    (start / "generation_config.json").unlink()


def sampling_flags(start: Path) -> None:
    edited(start / "generation_config.json", do_sample=False, temperature=0.6, top_p=0.9)


def several_ends(start: Path) -> None:
    edited(start / "generation_config.json", eos_token_id=[62, 63])


def no_end(start: Path) -> None:
    edited(start / "generation_config.json", eos_token_id=None)
    config = json.loads((start / "config.json").read_text())
    del config["eos_token_id"]
    (start / "config.json").write_text(json.dumps(config))


def names_of_code(start: Path) -> None:
    edited(start / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})


@needs_release_4
def test_generate_stops_where_the_run_ended_a_response(tmp_path: Path) -> None:
    """The end is a token of the tokenizer that no other file of the model names, or one of several."""
    kinds: list[Callable[[Path], None]] = [no_file, sampling_flags, several_ends, no_end, names_of_code]
    first = save_words(tmp_path / "start")
    write(first, in_names_of_release_5(fields_of("llama")))
    config, checkpoint, _ = saved_after_a_step(first, tmp_path / "run")
    write_model(config, checkpoint, tmp_path / "unstopped")
    path = read(tmp_path / "unstopped").generated
    end = next(token for token in path[2:] if path.index(token) > 1)
    exports = []
    for edit in kinds:
        start = save_words(tmp_path / edit.__name__, end=end)
        for file in ("config.json", "generation_config.json", "model.safetensors"):
            (start / file).write_bytes((first / file).read_bytes())
        edit(start)
        write_model(make_config(start, num_workers=1), checkpoint, tmp_path / f"{edit.__name__}_export")
        exports.append(tmp_path / f"{edit.__name__}_export")
    expected = path[: path.index(end) + 1]
    assert 2 < len(expected) < NEW_TOKENS
    for export, found in zip(exports, read_with_release_4(exports, tmp_path), strict=True):
        here = read(export)
        same(found, here)
        assert here.generated == expected, export.name
        named = json.loads((export / "config.json").read_text()).get("eos_token_id", [])
        generation = json.loads((export / "generation_config.json").read_text())
        assert end in (named if isinstance(named, list) else [named]) or export.name == "no_end_export"
        if export.name == "sampling_flags_export":
            assert (generation["temperature"], generation["top_p"]) == (0.6, 0.9), "as it is"


def test_an_export_names_no_code_that_it_does_not_hold(tmp_path: Path) -> None:
    """Phi-3 and its like do, although transformers has the model: readers that allow code would look for the files."""
    start = save_words(save_policy(tmp_path / "start"))
    names_of_code(start)
    edited(start / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]})
    export = exported(start, tmp_path)
    for name in ("config.json", "tokenizer_config.json"):
        given, written = (json.loads((path / name).read_text()) for path in (start, export))
        assert given["auto_map"] and "auto_map" not in written, name


def test_special_tokens_of_release_5_are_special_for_both(tmp_path: Path) -> None:
    path = save_words(tmp_path)
    edited(path / "tokenizer_config.json", extra_special_tokens=["a"])
    describe_tokenizer_for_release_4(path)
    described = json.loads((path / "tokenizer_config.json").read_text())
    assert described["additional_special_tokens"] == ["a"] and "extra_special_tokens" not in described
    assert load_tokenizer(path).all_special_tokens == ["<eos>", "a"]


def test_files_that_need_no_change_are_copied_bit_by_bit(tmp_path: Path) -> None:
    start = save_words(tmp_path / "start")
    write(start, in_names_of_release_5(fields_of("qwen3") | {"eos_token_id": 1}))
    config = json.loads((start / "config.json").read_text())
    rope = config.pop("rope_parameters")
    described = config | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": "float32"}
    texts = {
        "config.json": json.dumps(described, indent=3) + "\n\n",
        "generation_config.json": '{"eos_token_id":[1],"temperature":0.6,"top_p":0.95,"of_another_release":{"a":null}}',
    }
    licenses = {"LICENSE.md": "Apache", "license": "License 2.0", "USE_POLICY.md": "no harm"}
    for name, text in (texts | licenses).items():
        (start / name).write_text(text)
    saved, checkpoint, _ = saved_after_a_step(start, tmp_path / "run")
    for dtype, name in ((None, "same"), (torch.bfloat16, "other")):
        write_model(saved, checkpoint, tmp_path / name, dtype=dtype)
    exported = {name: (tmp_path / "same" / name).read_text() for name in (texts | licenses)}
    assert exported == texts | licenses
    types = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert json.loads((tmp_path / "other" / "config.json").read_text()) == described | types
    assert (tmp_path / "other" / "generation_config.json").read_text() == texts["generation_config.json"]


def test_kinds_of_layers_with_embeddings_of_their_own_are_said_to_be_for_transformers_5(tmp_path: Path) -> None:
    start = save_words(tmp_path / "start")
    rope = {
        kind: {"rope_type": "default", "rope_theta": THETA * factor}
        for kind, factor in (("full_attention", 1), ("sliding_attention", 0.1))
    }
    write(start, {"model_type": "olmo3", **SIZES, "rope_parameters": rope, "layer_types": list(rope)})
    export = exported(start, tmp_path)
    assert json.loads((export / "config.json").read_text())["rope_parameters"]["full_attention"]["rope_theta"] == THETA
    assert "transformers 4 does not read them and takes its defaults" in release_4_note(export)
    rope_of_all = exported(save_words(save_policy(tmp_path / "other")), tmp_path / "other")
    assert release_4_note(rope_of_all) == ""


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("generation_config.json", '{"eos_token_id": 256', "Expecting ',' delimiter"),
        ("generation_config.json", "[]", "it must hold a JSON object, got an array"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id must be a token id or a list of them"),
        ("generation_config.json", '{"eos_token_id": [1, -1]}', "eos_token_id must be a token id or a list of them"),
        ("config.json", '{"torch_dtype": "torch.bfloat16"}', "torch_dtype must be the name of a type"),
        ("config.json", '{"dtype": "auto"}', "dtype must be the name of a type"),
        ("config.json", '{"model_type": "qwen2",}', "Expecting property name"),
        ("special_tokens_map.json", "", "Expecting value"),
        ("model.safetensors.index.json", "{}", "weight_map must be a JSON object, got null"),
    ],
)
def test_a_file_that_became_unreadable_is_named(tmp_path: Path, name: str, text: str, fault: str) -> None:
    start = save_words(save_policy(tmp_path / "start"))
    config, checkpoint, _ = saved_after_a_step(start, tmp_path / "run")
    (start / name).write_text(text)
    with pytest.raises(StartError) as caught:
        write_model(config, checkpoint, tmp_path / "out")
    said = str(caught.value)
    assert said.startswith("model.path must be") and name in said and fault in said, said
    assert not (tmp_path / "out").exists()


def test_the_part_of_a_model_that_reads_text_has_the_type_and_the_ends_too(tmp_path: Path) -> None:
    text = {"dtype": "float16", "eos_token_id": 3, "hidden_size": 4}
    given = {"model_type": "own", "torch_dtype": None, "vision_config": {"depth": 2}, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(given))
    (tmp_path / "out").mkdir()
    copy_description(tmp_path, tmp_path / "out", dtype=torch.bfloat16, stop_ids=(3, 7))
    text = {"dtype": "bfloat16", "eos_token_id": [3, 7], "hidden_size": 4}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == given | {
        "torch_dtype": "bfloat16", "text_config": text
    }  # fmt: skip
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": [3, 7]}
