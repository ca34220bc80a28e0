"""ArithmeticModelConfig -> a Hugging Face directory: a small Qwen2 or Qwen3-MoE, trained on mixed demonstrations.

The start of the CPU demonstration: `rollout/data/arithmetic.py` gives problems, demonstrations and tokenizer, and the
directory made here is loaded by the engines and the policy like any other model. Training takes about a minute on
one core, so the result is cached (trainer/rundir/cache.py).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollout.data.arithmetic import TOKENS, Demonstration, demonstrations, save_tokenizer
from rollout.data.tokenizer import load_tokenizer
from trainer.config.training import ArithmeticModelConfig
from trainer.models.config_files import describe_for_release_4
from trainer.rundir.cache import Progress, cached_directory, default_cache_dir

FORMAT_VERSION = 3
"""Part of the cache key; raise it when the task, the model or its training changes."""
WEIGHTS = "model.safetensors"
FILES = ("config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json")
"""Files that a complete entry holds besides the manifest."""
HEAD_SIZE = 32
MAX_POSITIONS = 256
MLP_FACTOR = 4
"""Width of a block that a token meets, in widths of the model."""
EXPERTS_PER_TOKEN = 4
NUM_THREADS = 1
"""A model of this size gains little from a second thread, loses six times its speed when another process holds the
other core (OpenMP threads spin while they wait), and has the same bits on every machine with just one."""

BATCH_SIZE = 64
"""Demonstrations per optimizer step."""
WRONG_FRACTION = 0.6
"""Share of demonstrations whose author forgets to carry: more than half, so that greedy decoding forgets to carry and
there is something to learn from the reward."""
SEED = 0
"""Seed of initialisation and demonstrations."""
PEAK_LR = 3e-3
WARMUP_STEPS = 50
MAX_GRAD_NORM = 1.0
IGNORED = -100
"""Label of a position without loss."""


class Batch(NamedTuple):
    """Demonstrations as tensors. B demonstrations, T tokens of the longest."""

    token_ids: torch.Tensor  # [B, T] int64: prompt, response, end-of-sequence, padding
    labels: torch.Tensor  # [B, T] int64: the token ids of the response and its end, IGNORED elsewhere


def build_base_model(
    model: ArithmeticModelConfig, *, cache_dir: Path | None = None, progress: Progress | None = None
) -> Path:
    """Return the directory of the base model, training it first unless an intact copy is cached.

    The directory holds config.json, generation_config.json, model.safetensors (float32) and the tokenizer. The same
    config gives the same bits on the same machine and versions.
    """

    def make(directory: Path) -> None:
        save_tokenizer(directory)
        _train(model, directory=directory, progress=progress)

    return cached_directory(base_model_entry(model, cache_dir=cache_dir), FILES, make)


def base_model_entry(model: ArithmeticModelConfig, *, cache_dir: Path | None = None) -> Path:
    """The directory of the base model in the cache, whether it is there or not."""
    # Everything that decides the weights.
    parts = {
        "format": FORMAT_VERSION,
        # Without what is at its default of no effect, so that a new option leaves the cached models valid.
        "model": {
            key: value for key, value in asdict(model).items() if value or key not in ("calculator", "num_experts")
        },
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return (cache_dir or default_cache_dir()) / f"arithmetic-{key}"


@contextmanager
def _deterministic() -> Iterator[None]:
    """Seed torch and use NUM_THREADS for the length of the block, then put the old state back."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        torch.set_num_threads(NUM_THREADS)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def network_config(model: ArithmeticModelConfig, *, pad_token_id: int, eos_token_id: int) -> PreTrainedConfig:
    """The network, as its config.json describes it.

    The experts that a token of a mixture meets have the size of the dense model's block. The mixture's head is not tied
    to the embedding: SGLang has no such Qwen3-MoE.
    """
    heads = model.hidden_size // HEAD_SIZE
    sizes: dict[str, Any] = {
        "vocab_size": len(TOKENS),
        "hidden_size": model.hidden_size,
        "intermediate_size": MLP_FACTOR * model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": not model.num_experts,
        "attention_dropout": 0.0,
        "pad_token_id": pad_token_id,
        "eos_token_id": eos_token_id,
        "bos_token_id": None,
        "dtype": "float32",
    }
    if not model.num_experts:
        return Qwen2Config(**sizes)
    return Qwen3MoeConfig(
        **sizes | {"head_dim": HEAD_SIZE},
        num_experts=model.num_experts,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        moe_intermediate_size=MLP_FACTOR * model.hidden_size // EXPERTS_PER_TOKEN,
        norm_topk_prob=True,
    )


def _new_model(model: ArithmeticModelConfig, *, pad_token_id: int, eos_token_id: int) -> PreTrainedModel:
    """Return the untrained network, float32, on the CPU."""
    config = network_config(model, pad_token_id=pad_token_id, eos_token_id=eos_token_id)
    return Qwen3MoeForCausalLM(config) if isinstance(config, Qwen3MoeConfig) else Qwen2ForCausalLM(config)


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


def response_loss(network: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the response tokens, nats, []."""
    # Padding is on the right, so causal attention alone keeps it out of every real token.
    logits = network(input_ids=batch.token_ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED)


def _train(model: ArithmeticModelConfig, *, directory: Path, progress: Progress | None) -> None:
    """Train on demonstrations and save into `directory`, which already holds the tokenizer."""
    tokenizer = load_tokenizer(directory)
    stream = demonstrations(wrong_fraction=WRONG_FRACTION, seed=SEED, calculator=model.calculator)
    with _deterministic():
        network = _new_model(model, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
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
            if progress is not None:
                progress(step, model.num_steps, f"loss {loss.item():.3f}")
        if not math.isfinite(loss.item()):
            raise RuntimeError(
                f"base model: the loss became {loss.item()} within model.num_steps={model.num_steps}; "
                "try another model.hidden_size"
            )
        network.save_pretrained(directory)
        describe_for_release_4(directory)


def _lr_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, then linear decay to zero at the end; the learning rate is PEAK_LR times this."""
    warmup = min(WARMUP_STEPS, num_steps)
    return min((step + 1) / warmup, (num_steps - step) / num_steps)
