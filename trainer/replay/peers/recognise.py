"""Any file that holds a step -> a bundle: which trainer wrote it is seen from its content.

A format without both log-probs, or one that only pickle reads, is refused with the way out.
"""

from __future__ import annotations

import re
from pathlib import Path

from trainer.replay.bundle import Bundle, BundleError, read_bundle
from trainer.replay.peers.nemo_rl import NAMES as OF_NEMO_RL
from trainer.replay.peers.nemo_rl import read_nemo_rl
from trainer.replay.peers.places import JSONL_OF_RANK, rank_files, rollout_of
from trainer.replay.peers.prime_rl import NAMES as OF_PRIME_RL
from trainer.replay.peers.prime_rl import read_prime_rl
from trainer.replay.peers.rows import HOW, first_keys
from trainer.replay.peers.slime import read_slime

ZIP = b"PK\x03\x04"
PARQUET = b"PAR1"
PICKLE = re.compile(rb"\x80[\x02-\x05]")


def read_any(path: Path, *, step: int | None = None) -> Bundle:
    """Read the step in `path`: a bundle, a file of another trainer, or a directory with the files of its ranks.

    `step`: the rollout, where a directory has several. Raises BundleError with everything that is wrong, and the way
    out.
    """
    if path.is_dir():
        return _read_directory(path, step)
    try:
        with path.open("rb") as file:
            head = file.read(16)
        size = path.stat().st_size
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error}") from error
    # A safetensors file begins with the length of its header, which is JSON: any of the signatures below may be in it.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") + 8 <= size:
        return read_bundle(path)
    if head.startswith(ZIP):
        return read_slime([path])
    if head.lstrip().startswith(b"{"):
        return _read_json_lines(path)
    raise_for_foreign(path, head)
    return read_bundle(path)


def raise_for_foreign(path: Path, head: bytes) -> None:
    """Raises BundleError if the file is of a known kind that cannot be read; `head` are its first bytes."""
    if head.startswith(PARQUET):
        raise BundleError(
            f"{path} is a parquet file. TRL's log_completions writes texts and rewards to these, and no log-probs: "
            f"the subclass in docs/bundle.md writes a bundle in TRL ({HOW})"
        )
    if re.fullmatch(r"rank_\d+\.bin", path.name):
        raise BundleError(
            f"{path} is a micro-batch that prime-rl sends to its trainer: it has the engine's log-probs only. Run "
            f"prime-rl with trainer.enable_token_export=true and give token_exports/step_N ({HOW})"
        )
    if PICKLE.match(head):
        raise BundleError(
            f"{path} is a pickle, such as DataProto.save_to_disk of verl writes: to load one can run code, so it is "
            f"not read. Load it in verl, and write it as a bundle with the function in docs/bundle.md ({HOW})"
        )


def _read_directory(directory: Path, step: int | None) -> Bundle:
    files = rank_files(directory)
    lines = [path for path in files if JSONL_OF_RANK.fullmatch(path.name)]
    if lines:
        return read_prime_rl(lines)
    rollouts = sorted({number for number in map(rollout_of, files) if number is not None})
    if not rollouts:
        raise BundleError(f"{directory} has no file of a rank: rank_<rank>.jsonl or <rollout>_<rank>.pt ({HOW})")
    if step is None and len(rollouts) > 1:
        raise BundleError(f"{directory} has several rollouts: write step=N with one of {_listed(rollouts)}")
    chosen = rollouts[0] if step is None else step
    if chosen not in rollouts:
        raise BundleError(f"{directory} has no rollout {chosen}; it has {_listed(rollouts)}")
    return read_slime([path for path in files if rollout_of(path) == chosen])


def _listed(rollouts: list[int]) -> str:
    shown = ", ".join(map(str, rollouts[:10]))
    return shown if len(rollouts) <= 10 else f"{shown} ... {rollouts[-1]}"


def _read_json_lines(path: Path) -> Bundle:
    keys = first_keys(path)
    if keys & {OF_PRIME_RL.rollout_logprobs, OF_PRIME_RL.old_logprobs}:
        return read_prime_rl([path])
    if keys & {OF_NEMO_RL.rollout_logprobs, OF_NEMO_RL.old_logprobs, OF_NEMO_RL.mask}:
        return read_nemo_rl(path)
    if {"input", "output", "score"} <= keys:
        raise BundleError(
            f"{path} is of verl's rollout_data_dir: texts and scores, no log-probs. The lines in docs/bundle.md write "
            f"a bundle in verl ({HOW})"
        )
    has = ", ".join(sorted(keys)[:12]) or "no row that is a JSON object"
    raise BundleError(
        f"{path} is of no trainer that is known: its first row has {has}. NeMo-RL writes {OF_NEMO_RL.old_logprobs}, "
        f"prime-rl {OF_PRIME_RL.old_logprobs} ({HOW})"
    )
