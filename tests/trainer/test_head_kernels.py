"""The head's kernels for GPUs, run by Triton's interpreter on the CPU, against plain torch in float64."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

CASES = Path(__file__).parent / "head_kernel_cases.py"


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, float]]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, str(CASES)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_values_and_gradients_are_those_of_plain_torch(rows: dict[str, dict[str, float]]) -> None:
    assert len(rows) == 49
    for case, errors in rows.items():
        if case == "bad":
            continue
        # In bfloat16 the gradient of the logits is rounded once, and the products are made of the rounded ones.
        rounding = 1e-2 if "bfloat16" in case else 5e-6
        assert max(errors["logprob"], errors["entropy"]) < 2e-5, (case, errors)
        assert max(errors["by hidden"], errors["by weight"]) < rounding, (case, errors)


def test_what_is_not_finite_stays_so(rows: dict[str, dict[str, float]]) -> None:
    assert rows["bad"] == {"finite": 0.0}


COMPILE_SCRIPT = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trainer.scoring.head_kernels import NUM_WARPS, _gradient_kernel, _score_kernel
numbers = {"statistics": "*fp32", "plane": "i32", "vocab": "i32", "temperature": "fp32", "targets": "*i64"}
for logits in ("*bf16", "*fp16", "*fp32"):
    kernels = [(_score_kernel, {"logprobs": "*fp32"}, {})]
    kernels += [(_gradient_kernel, {"upstream": "*fp32"}, {"HAS_ENTROPY": value}) for value in (False, True)]
    for kernel, more, constants in kernels:
        signature = numbers | {"logits": logits} | more | dict.fromkeys(constants, "constexpr")
        signature = {name: signature[name] for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": NUM_WARPS})
        sys.stdout.write(f"{len(compiled.asm['cubin']) > 0} ")
"""


def test_the_kernels_compile_for_gpus_that_are_not_here() -> None:
    """For sm_90: every type of the logits, and the gradient with and without that of the entropy."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "ignore", "-c", COMPILE_SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 9
