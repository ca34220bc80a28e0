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
