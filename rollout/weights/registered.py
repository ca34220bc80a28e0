"""Host memory that CUDA has page-locked: copies between it and the GPU of this process take the bus's full speed.

`rollout/weights/shared_weights.py` registers memory with weights that a GPU writes or reads. Copies from and to other
memory go through small buffers of the driver, at a fraction of the speed. Not yet run on a GPU: check 1 of
`make gpu-check` measures both.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

logger = logging.getLogger(__name__)


def uses_cuda() -> bool:
    """True if this process has work on a GPU."""
    return torch.cuda.is_initialized()


class Registration:
    """Keeps memory page-locked until `close`. Where CUDA refuses, the memory is used as it is, and the log says so."""

    def __init__(self, memory: np.ndarray) -> None:
        """`memory` [bytes] uint8 begins on a page, is mapped shared, and its pages exist: CUDA locks what is there.

        A private mapping would be copied by it, and show no later change.
        """
        self._address = memory.ctypes.data
        status = int(torch.cuda.cudart().cudaHostRegister(self._address, memory.nbytes, 0))
        if status:
            logger.warning(
                "cudaHostRegister of %.2f GiB of shared weights failed with CUDA error %d: they are copied as pageable "
                "memory, several times more slowly",
                memory.nbytes / 2**30,
                status,
            )
            self._address = 0
            _forget_error()

    def close(self) -> None:
        """Unlock the memory, which must not be unmapped before; safe to call twice."""
        if self._address:
            status = int(torch.cuda.cudart().cudaHostUnregister(self._address))
            self._address = 0
            if status:
                logger.warning("cudaHostUnregister of shared weights failed with CUDA error %d", status)
                _forget_error()


def _forget_error() -> None:
    """Take the error that a failed call has left in CUDA: else the next kernel reports it as its own."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        logger.debug("taken from CUDA: %s", error)
