"""ArithmeticModelConfig -> a Hugging Face directory: a small Qwen2 trained on demonstrations of mixed quality.

The start of the CPU demonstration: `rollout/data/arithmetic.py` gives problems, demonstrations and tokenizer, and the
directory made here is loaded by the engines and the policy like any other model. Training takes about a minute on
one core, so the result is cached; an entry holds a manifest of its files and is rebuilt when one does not agree.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers

from rollout.data.arithmetic import TOKENS, Demonstration, demonstrations, save_tokenizer
from rollout.hf.transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM
from rollout.task_config import ArithmeticDataConfig
from trainer.config.components import ArithmeticModelConfig
from trainer.rundir.cache import default_cache_dir

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, float], None]
"""Called with (completed optimizer steps, all steps, loss in nats per response token)."""

FORMAT_VERSION = 1
"""Part of the cache key; raise it when the task, the model or its training changes."""
MANIFEST = "manifest.json"
"""File of a cache entry: name -> sha256 of every other file."""
WEIGHTS = "model.safetensors"
FILES = ("config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json")
"""What a complete entry holds besides the manifest."""
ABANDONED_AFTER_S = 3600.0
"""A build directory older than this belongs to a process that was killed: a build takes a minute or two."""
HEAD_SIZE = 32
MAX_POSITIONS = 256
NUM_THREADS = 1
"""A model of this size gains little from a second thread, loses six times its speed when another process holds the
other core (OpenMP threads spin while they wait), and has the same bits on every machine with just one."""

BATCH_SIZE = 64
"""Demonstrations per optimizer step."""
PEAK_LR = 3e-3
WARMUP_STEPS = 50
MAX_GRAD_NORM = 1.0
LOG_EVERY = 100
IGNORED = -100
"""Label of a position without loss."""


class Batch(NamedTuple):
    """Demonstrations as tensors. B demonstrations, T tokens of the longest."""

    token_ids: torch.Tensor  # [B, T] int64: prompt, response, end-of-sequence, padding
    labels: torch.Tensor  # [B, T] int64: the token ids of the response and its end, IGNORED elsewhere


def build_base_model(
    model: ArithmeticModelConfig,
    data: ArithmeticDataConfig,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the directory of the base model, training it first unless an intact copy is cached.

    The directory holds config.json, generation_config.json, model.safetensors (float32) and the tokenizer. It is
    made under a temporary name and renamed when complete, so that a killed build leaves no entry and of two
    builds at the same time one is kept. The same configs give the same bits on the same machine and versions.
    """
    root = cache_dir or default_cache_dir()
    root.mkdir(parents=True, exist_ok=True)
    entry = root / f"arithmetic-{_cache_key(model, data)}"
    if entry.exists():
        damage = find_damage(entry)
        if damage is None:
            logger.info("base model: cached in %s", entry)
            return entry
        logger.warning("base model: %s is damaged (%s) and is built again", entry, damage)
    _remove_abandoned(root, entry.name)
    building = Path(tempfile.mkdtemp(prefix=f"{entry.name}.building-", dir=root))
    try:
        save_tokenizer(building)
        _train(model, data, directory=building, progress=progress)
        _write_manifest(building)
        _publish(building, entry)
    finally:
        # Already renamed after a publication; still there after an error, an interrupt, or a lost race.
        shutil.rmtree(building, ignore_errors=True)
    return entry


def find_damage(entry: Path) -> str | None:
    """Say what is wrong with a cached model: a missing or changed file; None if it is intact."""
    try:
        expected = json.loads((entry / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return f"{MANIFEST}: {error}"
    if not isinstance(expected, dict) or sorted(expected) != sorted(FILES):
        return f"{MANIFEST}: must list {', '.join(FILES)}"
    for name, digest in expected.items():
        try:
            found = _file_digest(entry / name)
        except OSError as error:
            return f"{name}: {error}"
        if found != digest:
            return f"{name}: sha256 {found[:12]}, the manifest says {digest[:12]}"
    return None


def _cache_key(model: ArithmeticModelConfig, data: ArithmeticDataConfig) -> str:
    """Hash everything that decides the weights, as 16 hex digits."""
    parts = {
        "format": FORMAT_VERSION,
        # Without what is at its default of no effect, so that a new option leaves the cached models valid.
        "model": {key: value for key, value in asdict(model).items() if key != "calculator" or value},
        "data": asdict(data),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_manifest(directory: Path) -> None:
    """Hash the files of a complete entry; raises FileNotFoundError if one is missing."""
    digests = {name: _file_digest(directory / name) for name in FILES}
    (directory / MANIFEST).write_text(json.dumps(digests, indent=2))


def _publish(building: Path, entry: Path) -> None:
    """Rename `building` to `entry`; keep an intact entry that another process put there first."""
    if entry.exists() and find_damage(entry) is not None:
        _remove_damaged(entry)
    try:
        os.rename(building, entry)
    except OSError:
        if find_damage(entry) is not None:
            raise
        logger.info("base model: another process has just built %s", entry)


def _remove_damaged(entry: Path) -> None:
    """Move `entry` away in one step, so that nobody sees half of it, and remove it there."""
    aside = Path(tempfile.mkdtemp(prefix=f"{entry.name}.damaged-", dir=entry.parent))
    try:
        os.rename(entry, aside)
    except FileNotFoundError:
        logger.info("base model: another process has just moved the damaged %s away", entry)
    shutil.rmtree(aside)


def _remove_abandoned(root: Path, name: str) -> None:
    """Remove what killed builds of the entry `name` left behind."""
    for left in [*root.glob(f"{name}.building-*"), *root.glob(f"{name}.damaged-*")]:
        try:
            age = time.time() - left.stat().st_mtime
        except FileNotFoundError:  # another process was faster
            continue
        if age > ABANDONED_AFTER_S:
            logger.info("base model: removing %s, left behind %.0f s ago", left, age)
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """Seed torch and use NUM_THREADS for the length of the block, then put the old state back."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(NUM_THREADS)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _new_model(model: ArithmeticModelConfig, *, pad_token_id: int, eos_token_id: int) -> Qwen2ForCausalLM:
    """Return the untrained network, float32, on the CPU."""
    heads = model.hidden_size // HEAD_SIZE
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=model.hidden_size,
        intermediate_size=4 * model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def collate(chosen: list[Demonstration], tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Tokenize demonstrations, end each with the end-of-sequence token, and pad them on the right."""
    prompts = tokenizer([demonstration.problem.prompt for demonstration in chosen]).input_ids
    responses = tokenizer([demonstration.response for demonstration in chosen]).input_ids
    rows = [[*prompt, *response, tokenizer.eos_token_id] for prompt, response in zip(prompts, responses, strict=True)]
    longest = max(len(row) for row in rows)
    token_ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        token_ids[index, : len(row)] = torch.tensor(row)
        labels[index, len(prompt) : len(row)] = token_ids[index, len(prompt) : len(row)]
    return Batch(token_ids=token_ids, labels=labels)


def response_loss(network: Qwen2ForCausalLM, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the response tokens, nats, []."""
    # Padding is on the right, so causal attention alone keeps it out of every real token.
    logits = network(input_ids=batch.token_ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED)


def _train(
    model: ArithmeticModelConfig, data: ArithmeticDataConfig, *, directory: Path, progress: Progress | None
) -> None:
    """Train on demonstrations and save into `directory`, which already holds the tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    stream = demonstrations(data, wrong_fraction=model.wrong_fraction, seed=model.seed, calculator=model.calculator)
    started = time.monotonic()
    with _deterministic(model.seed):
        network = _new_model(model, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
        size = sum(parameter.numel() for parameter in network.parameters())
        logger.info("base model: training %d parameters for %d steps", size, model.num_steps)
        optimizer = torch.optim.AdamW(network.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, model.num_steps))
        network.train()
        for step in range(1, model.num_steps + 1):
            loss = response_loss(network, collate(list(itertools.islice(stream, BATCH_SIZE)), tokenizer))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()
            if step % LOG_EVERY == 0 or step == model.num_steps:
                logger.info("base model: step %d/%d, loss %.4f", step, model.num_steps, loss.item())
            if progress is not None:
                progress(step, model.num_steps, loss.item())
        if not math.isfinite(loss.item()):
            raise RuntimeError(
                f"base model: the loss became {loss.item()} within model.num_steps={model.num_steps}; "
                "try another model.seed or model.hidden_size"
            )
        network.save_pretrained(directory)
    logger.info("base model: trained in %.1f s", time.monotonic() - started)


def _lr_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, then linear decay to zero at the end; the learning rate is PEAK_LR times this."""
    warmup = min(WARMUP_STEPS, num_steps)
    return min((step + 1) / warmup, (num_steps - step) / num_steps)
