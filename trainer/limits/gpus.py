"""Speeds of GPUs that are elsewhere, as their data sheets give them, for `parity train <recipe> --on 8xH100-80GB`."""

from __future__ import annotations

import re
from typing import NamedTuple

from algorithms.config import Problem


class Gpus(NamedTuple):
    """A number of equal GPUs."""

    memory_mib: int
    """Memory as nvidia-smi shows it."""
    flops: float
    """FLOPs per second of a product in bfloat16, without sparsity, added up in float32."""
    bytes_per_s: float
    """Bytes per second of the memory."""
    link: float
    """Bytes per second to another GPU of the machine, in one direction."""
    name: str = ""
    number: int = 1

    @property
    def memory(self) -> int:
        """Bytes of each."""
        return self.memory_mib * 2**20


GPUS = {
    "A100-40GB": Gpus(40_960, 312e12, 1.555e12, 300e9),
    "A100-80GB": Gpus(81_920, 312e12, 2.039e12, 300e9),
    "B200-180GB": Gpus(183_359, 2250e12, 7.7e12, 900e9),
    "H20-96GB": Gpus(97_871, 148e12, 4.0e12, 450e9),
    "H100-80GB": Gpus(81_559, 989e12, 3.35e12, 450e9),
    "H200-141GB": Gpus(143_771, 989e12, 4.8e12, 450e9),
    "L40S-48GB": Gpus(46_068, 362e12, 0.864e12, 25e9),
    "RTX-4090-24GB": Gpus(24_564, 165.2e12, 1.008e12, 25e9),
    "RTX-5090-32GB": Gpus(32_607, 209.5e12, 1.792e12, 50e9),
}
"""Sources: NVIDIA's data sheets of the SXM forms, of L40S and H20, and the white papers of Ada and of RTX Blackwell.
Where a sheet has the number with sparsity, half of it; half of NVLink's, which is of both directions together. Without
NVLink that of the PCIe bus."""


def gpus_named(text: str, *, flag: str) -> Gpus | Problem:
    """The GPUs that a word such as 8xH100-80GB names; the Problem of another word after `flag`."""
    match = re.fullmatch(r"([1-9]\d{0,4})x(.+)", text)
    if match is None or (gpu := GPUS.get(match[2])) is None:
        remedy = f"For example 8xH100-80GB, or 16xH100-80GB for two machines of 8; there are {', '.join(GPUS)}."
        return Problem(key=flag, rule="must be a number of GPUs, x, and their name", value=text, remedy=remedy)
    return gpu._replace(name=match[2], number=int(match[1]))
