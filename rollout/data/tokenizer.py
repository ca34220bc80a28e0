"""A model's directory -> its tokenizer, as its files describe it; and these files for another directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rollout.data.hub import LICENCE_FILES

TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json", "added_tokens.json",
    "special_tokens_map.json", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip
"""Patterns of the files that describe a tokenizer and its chat templates."""

PROBE = "What is 12 + 7? Larger words, CAPITALS and\nnew lines."
"""Text on which two readings of a tokenizer are compared."""


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the model in `directory`: what its tokenizer.json says, if it has one.

    AutoTokenizer picks a class by the model type in config.json, and many a class keeps only the vocabulary of
    tokenizer.json: a tokenizer of words beside a Qwen2 model becomes one of byte pairs, without a warning.

    Raises whatever the readers of transformers raise, and ValueError for a tokenizer of special tokens alone, which
    AutoTokenizer makes where the files of the vocabulary are missing.
    """
    is_whole = (directory / "tokenizer.json").is_file()
    kind = PreTrainedTokenizerFast if is_whole else AutoTokenizer
    tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(directory, trust_remote_code=False)
    if not is_whole and len(tokenizer.get_vocab()) <= len(tokenizer.added_tokens_decoder):
        raise ValueError("it has special tokens alone: tokenizer.json, which holds the vocabulary, is missing")
    return tokenizer


def auto_tokenizer_note(directory: Path) -> str:
    """A sentence if AutoTokenizer, with which others load the model in `directory`, reads another tokenizer; or ""."""
    if not (directory / "tokenizer.json").is_file():
        return ""
    tokenizer = load_tokenizer(directory)
    probe = PROBE
    try:
        own = tokenizer(probe).input_ids
    except Exception:  # the library raises no narrower class for words outside of a vocabulary without "unknown"
        probe = str(tokenizer.decode(list(range(min(len(tokenizer), 20))), skip_special_tokens=True))
        own = tokenizer(probe).input_ids
    try:
        read = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        if read(probe).input_ids == own:
            return ""
        found = f"reads a {type(read).__name__} there, which gives other tokens than the run was trained with"
    except Exception as error:  # whatever the class that it picks finds missing
        found = f"cannot read it ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    return (
        f"the tokenizer in {directory}: AutoTokenizer of transformers {found}. Load it with "
        "PreTrainedTokenizerFast.from_pretrained, which takes its tokenizer.json as it is"
    )


def adapter_tokenizer_note(adapter: Path, model: Path) -> str:
    """A sentence if an adapter came with another tokenizer, or chat template, than its `model` has; or ""."""
    if not (adapter / "tokenizer.json").is_file():
        return ""
    own, used = load_tokenizer(adapter), load_tokenizer(model)
    if (own.get_vocab(), own.chat_template) == (used.get_vocab(), used.chat_template):
        return ""
    return (
        f"{adapter} has a tokenizer or a chat template of its own, and the evaluation reads those of the model. If the "
        "adapter was trained with its own, merge both with peft, save its tokenizer there, and evaluate that model"
    )


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of the tokenizer in `source` as they are, because transformers would write what it made of them.

    The licence comes along. transformers 5 also names classes that earlier releases do not have.
    """
    for path in {
        found for pattern in (*TOKENIZER_FILES, *LICENCE_FILES) for found in source.glob(pattern) if found.is_file()
    }:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
