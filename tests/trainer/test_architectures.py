"""Tiny models of families that Parity does not compute: each is refused for what it is, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.models.directory import find_model
from trainer.models.resolve import compare_files
from trainer.rundir.run_dir import StartError

SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURE = "model.path must be a model of an architecture that Parity computes"


@pytest.mark.parametrize(
    ("family", "rule", "reason"),
    [
        ("gpt_neox", "named as by its class in transformers", "lm_head.weight; they hold others, .*: embed_out.weight"),
        ("granite", ARCHITECTURE, "logits after the head .logits_scaling=2.0"),
        ("gemma2", ARCHITECTURE, "logits after the head .final_logit_softcapping"),
        ("cohere", ARCHITECTURE, "logits after the head .logit_scale"),
        ("mamba", ARCHITECTURE, "packed sequences would read each other .*(linear_attention|mamba)"),
        ("recurrent_gemma", ARCHITECTURE, "takes no attention but its own"),
        ("bloom", ARCHITECTURE, "takes no attention but its own"),
        ("falcon", ARCHITECTURE, "takes no attention but its own"),
    ],
)
def test_a_family_is_refused_for_what_it_computes(family: str, rule: str, reason: str, tmp_path: Path) -> None:
    own = {"logits_scaling": 2.0} if family == "granite" else {}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **own)).save_pretrained(tmp_path)
    with pytest.raises(StartError, match=f"(?s){rule}.*{reason}"):
        compare_files("model.path", tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "phi3", "olmo2", "gemma3_text", "opt"])
def test_a_family_that_is_computed_passes(family: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES)).save_pretrained(tmp_path)
    compare_files("model.path", tmp_path)


def test_a_value_that_transformers_does_not_know_is_the_fault_of_config_json(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SIZES))
    model.config.hidden_act = "wiggle"
    model.save_pretrained(tmp_path)
    with pytest.raises(StartError, match=r"transformers makes no model of config\.json: KeyError: 'wiggle'"):
        compare_files("model.path", tmp_path)


def test_a_family_that_does_not_pass_on_the_boundaries_is_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model("nemotron", **SIZES)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "where the sequences of a batch begin" in str(find_model("model.path", str(tmp_path), None))
