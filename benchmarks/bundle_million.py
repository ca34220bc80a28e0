"""`parity replay` on a step of a million tokens: seconds and peak memory of the child process, as a markdown table.

The log-probs are random: responses of up to 4096 tokens, a third of them short, with a mismatch of 0.02 nats and a
tail. The same step is written as a bundle, and in the formats of NeMo-RL, prime-rl and slime; those rows are padded
where their trainer pads them. Peak memory is the largest resident set of the child, with Python and torch in it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from trainer.replay.bundle import Bundle, write_bundle

PROMPT = 128
SECONDS, GIB = 60.0, 2.0
"""What a replay may take."""


def main() -> int:
    """Write, replay and print; the exit status is 1 if a replay fails or takes more than it may."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--longest", type=int, default=4096)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    bundle = step(arguments.tokens, arguments.longest)
    out, broken = sys.stdout.write, []
    out(f"{len(bundle.lengths):,} responses, {len(bundle.old_logprobs):,} response tokens\n\n")
    out("| file | MB | seconds | processor seconds | peak memory, GiB |\n| --- | --: | --: | --: | --: |\n")
    for name, write in (("bundle", as_bundle), ("NeMo-RL", nemo_rl), ("prime-rl", prime_rl), ("slime", slime)):
        with tempfile.TemporaryDirectory(prefix="parity-million-") as place:
            path = write(bundle, Path(place))
            seconds, own, gib, status = replayed(path, Path(place) / "out")
            out(f"| {name} | {path.stat().st_size / 1e6:,.0f} | {seconds:.1f} | {own:.1f} | {gib:.2f} |\n")
            sys.stdout.flush()
            if status != 0 or seconds > SECONDS or gib > GIB:
                broken.append(name)
    if broken:
        sys.stderr.write(f"failed, or more than {SECONDS:g} s or {GIB:g} GiB: {', '.join(broken)}\n")
    return int(bool(broken))


def step(tokens: int, longest: int) -> Bundle:
    """A random step of exactly `tokens` response tokens."""
    lengths: list[int] = []
    while sum(lengths) < tokens:
        most = longest if torch.rand(()) > 1 / 3 else longest // 8
        lengths.append(min(int(torch.randint(1, most + 1, ())), tokens - sum(lengths)))
    rollout = -(torch.rand(tokens) ** 4) * 8 - 1e-4
    spread = torch.where(torch.rand(tokens) < 0.01, 0.3, 0.02)
    responses = len(lengths)
    return Bundle(
        lengths=torch.tensor(lengths, dtype=torch.int32),
        rollout_logprobs=rollout,
        old_logprobs=(rollout + spread * torch.randn(tokens)).clamp(max=-1e-6),
        advantages=torch.randn(responses).repeat_interleave(torch.tensor(lengths)),
        token_ids=torch.randint(0, 150_000, (tokens,), dtype=torch.int32),
        rewards=(torch.rand(responses) > 0.5).float(),
        groups=torch.arange(responses) // 8,
        metadata={"producer": "benchmark", "step": "12"},
    )


def replayed(path: Path, out: Path) -> tuple[float, float, float, int]:
    """(seconds, processor seconds, peak GiB, exit status) of `parity replay` in a process of its own."""
    words = [sys.executable, "-m", "trainer", "replay", str(path), f"out={out}"]
    started = time.perf_counter()
    # wait4 tells of this child alone; resource.getrusage would give the largest of all.
    child = os.posix_spawn(
        sys.executable,
        words,
        dict(os.environ),
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(child, 0)
    seconds, own = time.perf_counter() - started, usage.ru_utime + usage.ru_stime
    return seconds, own, usage.ru_maxrss / 2**20, os.waitstatus_to_exitcode(status)


def as_bundle(bundle: Bundle, place: Path) -> Path:
    """The bundle itself."""
    path = place / "step.safetensors"
    write_bundle(bundle, path)
    return path


def _responses(bundle: Bundle) -> list[dict[str, Tensor]]:
    """The tensors of each response, and its token ids behind a prompt."""
    lengths = bundle.lengths.tolist()
    names = ("rollout_logprobs", "old_logprobs", "advantages", "token_ids")
    parts = [getattr(bundle, name).split(lengths) for name in names]
    found = [dict(zip(names, each, strict=True)) for each in zip(*parts, strict=True)]
    for number, each in enumerate(found):
        prompt = torch.full((PROMPT,), number // 8, dtype=torch.int32)
        each["tokens"] = torch.cat([prompt, each.pop("token_ids")])
    return found


def nemo_rl(bundle: Bundle, place: Path) -> Path:
    """train_data_step12.jsonl: every list is padded to the longest sequence."""
    path = place / "train_data_step12.jsonl"
    width = PROMPT + int(bundle.lengths.max())

    def padded(values: Tensor, before: int) -> list[list[float]]:
        return [[0.0] * before + values.tolist() + [0.0] * (width - before - len(values))]

    with path.open("w", encoding="utf-8") as file:
        for number, each in enumerate(_responses(bundle)):
            row = {
                "content": ["text"],
                "rewards": [float(number % 2)],
                "input_lengths": [len(each["tokens"])],
                "token_ids": [each["tokens"].tolist() + [0] * (width - len(each["tokens"]))],
                "token_loss_mask": padded(torch.ones_like(each["old_logprobs"]), PROMPT),
                "sample_loss_mask": [1.0],
                "advantages": padded(each["advantages"], PROMPT),
                "generation_logprobs": padded(each["rollout_logprobs"], PROMPT),
                "prev_logprobs": padded(each["old_logprobs"], PROMPT),
                "idx": number,
            }
            file.write(json.dumps(row) + "\n")
    return path


def prime_rl(bundle: Bundle, place: Path) -> Path:
    """rank_0.jsonl, with all the lists that prime-rl writes for each token."""
    path = place / "rank_0.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number, each in enumerate(_responses(bundle)):
            size = len(each["tokens"])
            delta = each["old_logprobs"] - each["rollout_logprobs"]
            own = {
                "advantages": each["advantages"],
                "inference_logprobs": each["rollout_logprobs"],
                "trainer_logprobs": each["old_logprobs"],
                "entropy": torch.rand(len(delta)),
                "mismatch_kl": torch.expm1(delta) - delta,
                "log_importance_ratio": delta,
                "importance_ratio": delta.exp(),
                "prob_delta": each["old_logprobs"].exp() - each["rollout_logprobs"].exp(),
            }
            row = {
                "schema_version": 1,
                "step": 12,
                "export_sequence_idx": number,
                "token_ids": each["tokens"].tolist(),
                "position_ids": list(range(size)),
                "loss_mask": [False] * PROMPT + [True] * len(delta),
                **{name: [0.0] * PROMPT + values.tolist() for name, values in own.items()},
                **{name: [False] * size for name in ("is_masked", "is_masked_high", "is_masked_low")},
                **{name: [None] * size for name in ("rl_weights", "ce_weights", "ref_kl_weights")},
            }
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    return path


def slime(bundle: Bundle, place: Path) -> Path:
    """12.pt, one dict per response."""
    samples = []
    for number, each in enumerate(_responses(bundle)):
        size = len(each["old_logprobs"])
        samples.append(
            {
                "sample_index": number,
                "tokens": each["tokens"].long(),
                "response_lengths": size,
                "loss_masks": torch.ones(size, dtype=torch.int32),
                "rollout_log_probs": each["rollout_logprobs"].clone(),
                "log_probs": each["old_logprobs"].clone(),
                "advantages": each["advantages"].clone(),
            }
        )
    path = place / "12.pt"
    torch.save({"format_version": 2, "rollout_id": 12, "rank": 0, "samples": samples, "dp_shards": []}, path)
    return path


if __name__ == "__main__":
    sys.exit(main())
