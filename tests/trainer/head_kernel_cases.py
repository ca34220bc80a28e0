"""Run by test_head_kernels.py in a process with Triton's interpreter: the kernels against plain torch in float64."""

from __future__ import annotations

import json
import sys
from itertools import product

import torch

from trainer.batch.train_batch import TokenSupports
from trainer.scoring import logprob_head
from trainer.scoring.logprob_head import HeadOptions, token_logprobs

NUM_TOKENS, SIZE = 5, 8


def largest_errors(
    dtype: torch.dtype, vocab: int, temperature: float, entropy_grad: bool, *, is_cut: bool = False
) -> dict[str, float]:
    """Name -> largest error of a value, or relative error of a gradient, against autograd in float64.

    With `is_cut` each token has a support of the last three ids: all blocks of logits before are cut whole.
    """
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((NUM_TOKENS, SIZE), (vocab, SIZE))
    )
    targets = torch.randint(vocab, (NUM_TOKENS,), generator=generator)
    targets[0], targets[1] = 0, vocab - 1
    up = torch.randn((2, NUM_TOKENS), generator=generator)
    leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
    options = HeadOptions(temperature=temperature, chunk_tokens=2, entropy_grad=entropy_grad)
    supports, kept = None, torch.ones(vocab, dtype=torch.bool)
    if is_cut:
        targets, kept[:-3] = targets % 3 + vocab - 3, False
        sizes = torch.full((NUM_TOKENS,), 3, dtype=torch.int32)
        supports = TokenSupports(sizes, torch.arange(vocab - 3, vocab, dtype=torch.int32).repeat(NUM_TOKENS))
    found = token_logprobs(leaves[0], targets, leaves[1], None, options, supports)
    exact = [each.double().requires_grad_() for each in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    logits = logits + (logits.to(dtype).double() - logits).detach()  # as the head's product rounds them
    logprobs = torch.log_softmax((logits / temperature).masked_fill(~kept, -1e9), -1)
    expected = [logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)]
    used = 2 if entropy_grad else 1
    grads, wanted = (
        torch.autograd.grad(sum((u * o).sum() for u, o in zip(up[:used], outs[:used], strict=True)), ins)
        for outs, ins in ((found, leaves), (expected, exact))
    )
    values = {"logprob": (found[0] - expected[0]), "entropy": (found[1] - expected[1])}
    errors = {name: error.abs().max().item() for name, error in values.items()}
    for name, grad, want in zip(("by hidden", "by weight"), grads, wanted, strict=True):
        errors[name] = ((grad - want).norm() / want.norm()).item()
    return errors


def tell(case: str, errors: dict[str, float]) -> None:
    sys.stdout.write(json.dumps([case, errors]) + "\n")


def main() -> None:
    """Print one JSON row per case."""
    logprob_head.takes_kernels = lambda hidden, dtype: True
    for dtype, vocab, temperature, entropy_grad in product(
        (torch.float32, torch.bfloat16), (7, 4096, 9001), (1.0, 0.7), (False, True)
    ):
        case = f"{dtype} {vocab} {temperature} {entropy_grad}"
        tell(case, largest_errors(dtype, vocab, temperature, entropy_grad))
        tell(f"{case} cut", largest_errors(dtype, vocab, temperature, entropy_grad, is_cut=True))
    weight = torch.ones(9, 2)
    weight[3, 0], weight[4, 1] = torch.nan, torch.inf
    options = HeadOptions(temperature=1.0, chunk_tokens=2)
    outs = token_logprobs(torch.eye(2), torch.tensor([1, 1]), weight, None, options)
    tell("bad", {"finite": float(torch.isfinite(torch.stack(outs)).sum())})


if __name__ == "__main__":
    main()
