"""Exact arithmetic on a GPU: kernels that give a row the same bits in any batch. Not yet run on a GPU.

SGLang has such kernels for products and means (after "Defeating Nondeterminism in LLM Inference", Thinking Machines,
2025). The server and the ranks both take them, so tiles are not needed. Everything else is as on a CPU: attention in
blocks of keys, one log-softmax, norms and activations of single operators.
"""

from __future__ import annotations

import os


def use_batch_invariant_kernels() -> None:
    """Have torch.mm, addmm, bmm and mean on a GPU use SGLang's kernels, in this process from now on.

    Products of float32 are then those of float32, not of TF32. Raises RuntimeError without SGLang.
    """
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # Triton reads it when it compiles a kernel
    try:
        from sglang.srt.batch_invariant_ops import enable_batch_invariant_mode
    except ImportError as error:
        raise RuntimeError(f"rollout.exact=true on a GPU needs SGLang's batch-invariant kernels: {error}") from error
    enable_batch_invariant_mode()
