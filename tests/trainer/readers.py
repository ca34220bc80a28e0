"""Model directories as other people read them: with transformers of this process, or with transformers 4 in a child.

    python readers.py write|read JOB      a child's side: JOB is a JSON file

requirements/install.sh puts transformers 4 into a directory of its own (requirements/transformers4.in).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

RELEASE_4 = Path(sys.prefix) / "share" / "transformers4"
NUM_TOKENS = 48
"""Of the text whose log-probs are compared."""
NEW_TOKENS = 12
PROMPT = [5, 6, 7, 8]
"""Tokens that generate() goes on with."""
needs_release_4 = pytest.mark.skipif(not RELEASE_4.is_dir(), reason=f"{RELEASE_4}: requirements/install.sh dev")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a reader makes of a model directory."""

    release: str
    """Version of transformers."""
    log_probs: Tensor
    """float32 [T, V] of NUM_TOKENS fixed tokens."""
    generated: list[int]
    """At most NEW_TOKENS tokens after PROMPT, greedily."""
    tokenizer: str
    """What AutoTokenizer reads there: name of a class, or an error."""


def read(directory: Path) -> Reading:
    """As transformers of this process reads `directory`."""
    model = AutoModelForCausalLM.from_pretrained(directory, torch_dtype=torch.float32, trust_remote_code=False).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (1, NUM_TOKENS), generator=generator)
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        log_probs = model(tokens).logits[0].log_softmax(-1)
        given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        generated = model.generate(prompt, **given)[0, len(PROMPT) :]
    try:
        tokenizer = type(AutoTokenizer.from_pretrained(directory, trust_remote_code=False)).__name__
    except Exception as error:  # each release raises another one
        tokenizer = str(error)
    return Reading(
        release=transformers.__version__, log_probs=log_probs, generated=generated.tolist(), tokenizer=tokenizer
    )


def read_with_release_4(directories: Sequence[Path], scratch: Path) -> list[Reading]:
    """As transformers 4 reads each of the `directories`, all in one child."""
    _child("read", {str(number): str(path) for number, path in enumerate(directories)}, scratch)
    tensors, said = load_file(scratch / "read.safetensors"), json.loads((scratch / "read.json").read_text())
    return [Reading(log_probs=tensors[number], **said[number]) for number in said]


def write(directory: Path, fields: Mapping[str, Any]) -> None:
    """A model of random weights, as transformers of this process saves it."""
    given = dict(fields)
    torch.manual_seed(0)
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def write_with_release_4(models: Mapping[Path, Mapping[str, Any]], scratch: Path) -> None:
    """Each of the `models`, directory -> fields of its config, as transformers 4 saves it."""
    _child("write", {str(path): dict(fields) for path, fields in models.items()}, scratch)


def _child(task: str, job: Mapping[str, Any], scratch: Path) -> None:
    (scratch / "job.json").write_text(json.dumps(job))
    environment = os.environ | {"PYTHONPATH": str(RELEASE_4), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, task, str(scratch / "job.json")],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def _main(task: str, path: Path) -> None:
    assert transformers.__version__.startswith("4.57."), transformers.__version__
    job: dict[str, Any] = json.loads(path.read_text())
    if task == "write":
        for directory, fields in job.items():
            write(Path(directory), fields)
        return
    found = {number: read(Path(directory)) for number, directory in job.items()}
    save_file({number: each.log_probs for number, each in found.items()}, path.with_name("read.safetensors"))
    said = {
        number: {"release": each.release, "generated": each.generated, "tokenizer": each.tokenizer}
        for number, each in found.items()
    }
    path.with_name("read.json").write_text(json.dumps(said))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]))
