"""How much the instruction set alone changes log-probs: the same tokens, weights, code and batch on one processor.

    python benchmarks/instruction_sets.py [--prompts 32] [--dtypes float32 bfloat16]

A rollout on one kind of accelerator and training on another is a mismatch of hardware. One processor can play
several: oneDNN, MKL and torch's own kernels each take an upper bound on the instructions that they may use.
SmolLM2-135M-Instruct answers word problems once; each setting then scores the same responses in a process of its own,
eight at a time. The table compares each setting with the processor as it is, token by token, as batch_size.py does. A
setting that changes nothing on this processor is left out of the table and named below it.

Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from batch_size import answered, load, scores, table_row
from real_step import place
from torch import Tensor

from rollout.weights.packing import DTYPES
from trainer.run.smollm2 import build_smollm2

AS_IT_IS = "as it is"
SETTINGS: dict[str, dict[str, str]] = {
    AS_IT_IS: {},
    "oneDNN: SSE4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "oneDNN: AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "oneDNN: AVX-512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "MKL: SSE2": {"MKL_CBWR": "COMPATIBLE"},
    "MKL: AVX2": {"MKL_CBWR": "AVX2"},
    "torch's kernels: scalar": {"ATEN_CPU_CAPABILITY": "default"},
    "torch's kernels: AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "all three: lowest": {
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "ATEN_CPU_CAPABILITY": "default",
    },
}
"""Setting -> environment variables of the libraries, read when they start."""
BATCH = 8


def score(path: Path, sequences: Path, dtype: str, result: Path) -> None:
    """Score in this process, whose environment holds the setting, and write log-probs [R] float64."""
    with torch.inference_mode():
        torch.save(scores(load(path, DTYPES[dtype]), json.loads(sequences.read_text()), size=BATCH), result)


def scored(setting: str, dtype: str, *, path: Path, sequences: Path) -> Tensor:
    """Log-probs [R] float64 of a process with `setting`."""
    result = sequences.with_suffix(".scores")
    command = [sys.executable, __file__, "--score", str(path), str(sequences), dtype, str(result)]
    subprocess.run(command, env=os.environ | SETTINGS[setting], check=True, timeout=3600)  # noqa: S603
    found: Tensor = torch.load(result, weights_only=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="log-probs of the same tokens under several instruction sets")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["float32", "bfloat16"])
    parser.add_argument("--score", nargs=4, metavar=("MODEL", "SEQUENCES", "DTYPE", "RESULT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.score:
        model, sequences, dtype, result = arguments.score
        score(Path(model), Path(sequences), dtype, Path(result))
        return
    path = build_smollm2()
    responses = answered(path, prompts=arguments.prompts)
    tokens = sum(len(ids) - prompt for ids, prompt in responses)
    capability = torch.backends.cpu.get_cpu_capability()
    sys.stdout.write(
        f"{place()} Torch's kernels use {capability}.\n\n{len(responses)} responses, {tokens:,} tokens.\n\n"
    )
    sys.stdout.write(
        "| type | setting | ratio outside [0.9, 1.1] | largest ratio | mean distance, nats | K3 | equal bits |\n"
    )
    sys.stdout.write("|---|---|--:|--:|--:|--:|--:|\n")
    unchanged: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        sequences_file = Path(directory) / "sequences.json"
        sequences_file.write_text(json.dumps(responses))
        for dtype in arguments.dtypes:
            reference = scored(AS_IT_IS, dtype, path=path, sequences=sequences_file)
            for setting in SETTINGS:
                found = scored(setting, dtype, path=path, sequences=sequences_file)
                if torch.equal(found, reference):
                    unchanged.append(f"{dtype}, {setting}")
                    continue
                sys.stdout.write(table_row(dtype, setting, reference, found))
                sys.stdout.flush()
    sys.stdout.write(f"\nEqual in every bit: {'; '.join(unchanged)}.\n")


if __name__ == "__main__":
    main()
