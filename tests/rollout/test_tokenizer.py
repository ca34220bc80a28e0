"""The tokenizer of a model's directory is what its tokenizer.json says, whatever class transformers would pick."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from rollout.data.arithmetic import save_tokenizer
from rollout.data.tokenizer import (
    TOKENIZER_FILES,
    adapter_tokenizer_note,
    auto_tokenizer_note,
    copy_tokenizer,
    load_tokenizer,
)

TEXT = "ab 1+2 = 3"


def word_level(directory: Path, *, model_type: str, **written: object) -> Path:
    """A tokenizer of characters, blanks included, beside a model of `model_type`; `written` replaces what was saved."""
    directory.mkdir(exist_ok=True)
    words = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(["<unk>", "<eos>", *TEXT])}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>").save_pretrained(directory)
    settings = directory / "tokenizer_config.json"
    kept = {**json.loads(settings.read_text()), **written}
    settings.write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


@pytest.mark.parametrize("named", [None, "PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "gpt2", "gemma", "llama", "nosuch"])
def test_words_of_ones_own_stay_words(tmp_path: Path, model_type: str, named: str | None) -> None:
    directory = word_level(tmp_path, model_type=model_type, tokenizer_class=named)
    tokenizer = load_tokenizer(directory)
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT).ids
    assert tokenizer.decode(ids) == TEXT and tokenizer("?")["input_ids"] == [tokenizer.unk_token_id]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<eos>", 1)


def test_no_end_of_sequence_token_is_invented(tmp_path: Path) -> None:
    """A class has one of its own, which would get a number outside of the model's vocabulary."""
    directory = word_level(tmp_path, model_type="qwen2", eos_token=None)
    assert load_tokenizer(directory).eos_token_id is None


def test_a_directory_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    """AutoTokenizer makes one of special tokens alone there, under which every text is empty."""
    directory = word_level(tmp_path, model_type="qwen2")
    (directory / "tokenizer.json").unlink()
    assert not AutoTokenizer.from_pretrained(directory)("2 + 3").input_ids
    with pytest.raises(ValueError, match=r"tokenizer\.json, which holds the vocabulary, is missing"):
        load_tokenizer(directory)


@pytest.mark.parametrize("kind", [Qwen2Tokenizer, GPT2Tokenizer, LlamaTokenizer, GemmaTokenizer])
def test_the_tokenizers_of_common_models_are_read_as_transformers_reads_them(tmp_path: Path, kind: type) -> None:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "\u2581", "ab", "\u0120\u0120"]
    special = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<bos>", "<eos>", "<mask>"]
    vocab = {token: index for index, token in enumerate([*special, *tokens])}
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    kind(
        vocab=vocab, merges=[("a", "b"), ("\u0120", "\u0120")], **names, extra_special_tokens=["<|im_start|>"]
    ).save_pretrained(tmp_path)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(theirs) is kind and ours.special_tokens_map == theirs.special_tokens_map
    assert ours.get_vocab() == theirs.get_vocab()
    for text in (TEXT, "  ab  12\n", "<|im_start|>user\nab</s>", "A\u030a"):
        for adds in (True, False):
            ids = ours(text, add_special_tokens=adds)["input_ids"]
            assert ids == theirs(text, add_special_tokens=adds)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_a_copy_holds_every_file_that_a_tokenizer_has(tmp_path: Path) -> None:
    source, target = word_level(tmp_path / "from", model_type="qwen2"), tmp_path / "to"
    tokenizer = load_tokenizer(source)
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    tokenizer.save_pretrained(source)
    (target).mkdir()
    copy_tokenizer(source, target)
    of_tokenizer = {path for path in source.rglob("*") if path.is_file() and path.name != "config.json"}
    assert len(of_tokenizer) == 4
    for path in of_tokenizer:
        assert (target / path.relative_to(source)).read_bytes() == path.read_bytes()
    assert load_tokenizer(target).get_chat_template("tools") == "{{ tools }}"
    named = {
        name for kind in (Qwen2Tokenizer, GPT2Tokenizer, LlamaTokenizer) for name in kind.vocab_files_names.values()
    }
    assert all(any(Path(name).match(pattern) for pattern in TOKENIZER_FILES) for name in named)


def test_a_tokenizer_that_others_read_in_another_way_is_told(tmp_path: Path) -> None:
    said = [auto_tokenizer_note(word_level(tmp_path / kind, model_type=kind)) for kind in ("qwen2", "llama", "nosuch")]
    assert "reads a Qwen2Tokenizer there, which gives other tokens" in said[0] and said[1:] == ["", ""]
    assert auto_tokenizer_note(tmp_path) == "", "a directory without tokenizer.json"
    save_tokenizer(tmp_path / "digits")
    assert auto_tokenizer_note(tmp_path / "digits") == "", "a vocabulary without a word for what is unknown"


def test_an_adapter_with_a_tokenizer_or_template_of_its_own_is_told(tmp_path: Path) -> None:
    model, adapter = word_level(tmp_path / "model", model_type="qwen2"), tmp_path / "adapter"
    adapter.mkdir()
    assert adapter_tokenizer_note(adapter, model) == "", "no tokenizer"
    copy_tokenizer(model, adapter)
    assert adapter_tokenizer_note(adapter, model) == "", "the same one"
    (adapter / "chat_template.jinja").write_text("another")
    assert f"{adapter} has a tokenizer or a chat template of its own" in adapter_tokenizer_note(adapter, model)
