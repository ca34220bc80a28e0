"""The vocabulary of rollout functions: texts as tokens, and the tokens with which a text can end a turn."""

from pathlib import Path

import orjson
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rollout.episodes.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def bytes_file(tmp_path_factory):
    """A byte-level vocabulary like that of most models, learnt from a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|im_end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    lines = ["<call>add(1, 2)</call>\n\nObservation: 3", "x = 答案 é = 5 </call>>= =>", "Final Answer: 12\n"] * 20
    tokenizer.train_from_iterator(lines, trainer)
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def bytes_vocabulary(bytes_file):
    return Vocabulary(bytes_file)


def test_limits_that_transformers_saved_are_not_those_of_an_observation(bytes_file, bytes_vocabulary, tmp_path):
    """It writes into tokenizer.json with which truncation and padding the tokenizer was called last."""
    tokenizer, path = Tokenizer.from_file(bytes_file), str(tmp_path / "tokenizer.json")
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    tokenizer.save(path)
    for text in ("3", "Observation: 3\n" * 9):
        assert Vocabulary(path).encode(text) == bytes_vocabulary.encode(text)


def test_a_text_can_end_in_a_token_beyond_a_gap_of_the_ids(bytes_file, tmp_path):
    described = orjson.loads(Path(bytes_file).read_bytes())
    described["model"]["vocab"]["</tool>"] = 1000
    (tmp_path / "tokenizer.json").write_bytes(orjson.dumps(described))
    assert 1000 in Vocabulary(str(tmp_path / "tokenizer.json")).enders("</tool>")


@pytest.mark.parametrize("text", ["19", " 19", "  19", "\n19", "", "é"])
def test_a_text_reads_after_another_as_it_is_written(text, tmp_path):
    """The tokenizers of Llama 2 and Mistral put a space before every text, and drop one when they decode."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁0123456789+=", "▁1", "▁19"]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [("▁", "1"), ("▁1", "9")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence([*parts])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary(str(tmp_path / "tokenizer.json"))
    assert vocabulary.decode([*vocabulary.encode("12 + 7 ="), *vocabulary.encode(text)]) == "12 + 7 =" + text
    assert vocabulary.decode_after(vocabulary.encode(" =")) == " ="


@pytest.mark.parametrize("text", ["</call>", "=", " =", "= ", "\n\n", "Observation:", "答案", "é", ">>", "tion: 3"])
def test_every_token_in_which_a_text_can_end_is_known(bytes_vocabulary, text):
    """All texts with the stop in them: the first token with which the stop is complete is one of those."""
    vocabulary, enders = bytes_vocabulary, bytes_vocabulary.enders(text)
    assert len(enders) < 250
    for line in (f"a {text} b", f"a{text}b", f"{text}{text}", f"x>{text}>", f"Final{text}Answer", f" {text}\n\n"):
        for ids in (vocabulary.encode(line), [token for char in line for token in vocabulary.encode(char)]):
            complete = next(end for end in range(1, len(ids) + 1) if text in vocabulary.decode(ids[:end]))
            assert ids[complete - 1] in enders, (text, line)


def test_names_of_special_tokens_and_ids_end_a_turn_as_tokens(bytes_vocabulary):
    assert bytes_vocabulary.special_token("<|im_end|>") == 0
    assert bytes_vocabulary.special_token("=") is bytes_vocabulary.special_token("no such") is None
