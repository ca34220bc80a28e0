"""Log-probs and entropy from hidden states, forward and backward: peak memory and time next to other ways.

    python benchmarks/logprob_head.py [--tokens 4096] [--vocab 151936] [--hidden 512] [--repeats 3] [--threads 2]

naive: all logits in float32, log_softmax, gather. checkpoint: chunks under torch.utils.checkpoint. ours:
`trainer/scoring/logprob_head.py`, and ahead: told the gradient of the loss while it scores, as the trainer does where
the loss of a token needs no other token. verl: `FusedLinearForPPO`. TRL: `selective_log_softmax_and_entropy` on the
head's logits.
The entropy is a value without gradient unless `--entropy-grad` is given. verl and TRL are optional (pip install verl
trl); what is not installed is left out.

Every measurement is a process of its own, variants in turn. Memory is the highest resident set (VmHWM, set back by
/proc/self/clear_refs) minus the resident set with the inputs in place; it includes the gradients. It counts pages in
use, not what an allocator reserves, and needs Linux. With one thread times are processor time, so that other programs
count little; with more they are wall time. The run fails if a variant's log-probs or gradients are not those of
float64 up to the rounding of the dtype. Prints Markdown, medians.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

CHECKED_TOKENS = 16
"""Tokens whose log-prob and gradient are compared with float64."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3}
"""Nats by which a log-prob may miss that of float64: a logit of bfloat16 near 16 is a multiple of 0.125."""

Score = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(hidden [N, H], targets [N], weight [V, H]) -> (log-probs [N], entropy [N])."""


def naive(args: argparse.Namespace) -> Score:
    def score(hidden: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(linear(hidden, weight).float() / args.temperature, dim=-1)
        with torch.set_grad_enabled(args.entropy_grad):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy

    return score


def checkpointed(args: argparse.Namespace) -> Score:
    def score_chunk(hidden: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logits = linear(hidden, weight).float() / args.temperature
        log_normalizer = torch.logsumexp(logits, dim=-1)
        logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_normalizer
        probs = torch.exp(logits - log_normalizer[:, None])
        return logprobs, log_normalizer - (probs * logits).sum(-1)

    def score(hidden: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        chunks = zip(hidden.split(args.chunk), targets.split(args.chunk), strict=True)
        parts = [checkpoint(score_chunk, rows, part, weight, use_reentrant=False) for rows, part in chunks]
        logprobs, entropies = zip(*parts, strict=True)
        entropy = torch.cat(entropies)
        return torch.cat(logprobs), entropy if args.entropy_grad else entropy.detach()

    return score


def ours(args: argparse.Namespace) -> Score:
    from trainer.scoring.logprob_head import HeadOptions, token_logprobs

    options = HeadOptions(temperature=args.temperature, chunk_tokens=args.chunk, entropy_grad=args.entropy_grad)
    return lambda hidden, targets, weight: token_logprobs(hidden, targets, weight, None, options)


def verl(args: argparse.Namespace) -> Score:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    fused = FusedLinearForPPO(chunk_size=args.chunk)

    def score(hidden: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = fused(hidden, weight, targets, args.temperature)
        return logprobs, entropy if args.entropy_grad else entropy.detach()

    return score


def trl(args: argparse.Namespace) -> Score:
    from trl.trainer.utils import selective_log_softmax_and_entropy

    def score(hidden: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return selective_log_softmax_and_entropy(
            linear(hidden, weight), targets, entropy_requires_grad=args.entropy_grad, temperature=args.temperature
        )

    return score


VARIANTS: dict[str, Callable[[argparse.Namespace], Score]] = {
    "naive": naive,
    "checkpoint": checkpointed,
    "ours": ours,
    "verl": verl,
    "trl": trl,
}
PEERS = ("verl", "trl")


def status_mib(field: str) -> float:
    """A field of /proc/self/status that is given in kB, MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def make_inputs(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of standard deviation 2.5: an entropy of 8.8 nats at 152k words."""
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.hidden).to(dtype)
    weight = (torch.randn(args.vocab, args.hidden) * (2.5 * args.hidden**-0.5)).to(dtype)
    return hidden.requires_grad_(), torch.randint(args.vocab, (args.tokens,)), weight.requires_grad_()


def signs_of(targets: Tensor) -> Tensor:
    """The gradient of the loss by each log-prob: of both signs, no two alike."""
    return torch.linspace(-1, 2, len(targets))


def step(score: Score, hidden: Tensor, targets: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward; (log-probs, gradient of the hidden states), the weight's gradient in `weight.grad`."""
    logprobs, entropy = score(hidden, targets, weight)
    loss = (signs_of(targets) * logprobs).sum()
    if entropy.requires_grad:
        loss = loss + entropy.sum()
    loss.backward()
    assert hidden.grad is not None
    return logprobs.detach(), hidden.grad


def measure(args: argparse.Namespace) -> dict[str, float]:
    """One variant in this process."""
    torch.set_num_threads(args.threads)
    score = VARIANTS[args.variant](args)
    hidden, targets, weight = make_inputs(args)
    small = [t.detach()[:2].clone() for t in (hidden, targets)]
    step(score, small[0].requires_grad_(), small[1] % 64, weight.detach()[:64].requires_grad_())  # loads libraries
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    base = status_mib("VmRSS")
    clock = time.process_time if args.threads == 1 else time.perf_counter
    started = clock()
    logprobs, grad_hidden = step(score, hidden, targets, weight)
    seconds = clock() - started
    peak = status_mib("VmHWM") - base
    return {"seconds": seconds, "peak_mib": peak, **errors(args, hidden, targets, weight, (logprobs, grad_hidden))}


def errors(
    args: argparse.Namespace, hidden: Tensor, targets: Tensor, weight: Tensor, found: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """Distance from float64 on the last tokens: largest of a log-prob, relative of their gradient."""
    last = slice(-CHECKED_TOKENS, None)
    rows = hidden.detach()[last].double().requires_grad_()
    logprobs = torch.log_softmax(rows @ weight.detach().double().T / args.temperature, dim=-1)
    chosen = logprobs.gather(-1, targets[last, None]).squeeze(-1)
    loss = (signs_of(targets)[last].double() * chosen).sum()
    if args.entropy_grad:
        loss = loss - (logprobs.exp() * logprobs).sum()
    loss.backward()
    assert rows.grad is not None
    gap = (found[0][last].double() - chosen.detach()).abs().max().item()
    grad_gap = ((found[1][last].double() - rows.grad).norm() / rows.grad.norm()).item()
    return {"logprob_error": gap, "grad_error": grad_gap}


def run_child(args: argparse.Namespace, variant: str, dtype: str) -> dict[str, float]:
    """The same script in a fresh process."""
    command = [sys.executable, __file__, "--variant", variant, "--dtype", dtype]
    for name in ("tokens", "vocab", "hidden", "chunk", "threads", "temperature"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(  # noqa: S603  (this script itself)
        command + ["--entropy-grad"] * args.entropy_grad, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{variant} {dtype}: exit {done.returncode}\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if result["logprob_error"] > TOLERANCE[dtype] or result["grad_error"] > TOLERANCE[dtype]:
        raise RuntimeError(f"{variant} {dtype} does not agree with float64: {result}")
    return result


def table(results: dict[tuple[str, str], list[dict[str, float]]], args: argparse.Namespace) -> str:
    clock = "processor" if args.threads == 1 else "wall"
    lines = [
        f"N = {args.tokens}, H = {args.hidden}, V = {args.vocab}, T = {args.temperature:g}, chunks of {args.chunk}, "
        f"entropy {'with' if args.entropy_grad else 'without'} gradient; torch {torch.__version__}, Python "
        f"{platform.python_version()}, {args.threads} thread(s), {clock} time, median (min - max) of {args.repeats}.",
        "",
        "| dtype | variant | peak over base, MiB | seconds | x naive | log-prob error | gradient error |",
        "|---|---|---|---|---|---|---|",
    ]
    for (dtype, variant), runs in results.items():
        seconds = [run["seconds"] for run in runs]
        middle = statistics.median(seconds)
        unit = statistics.median(run["seconds"] for run in results[dtype, "naive"])
        peak = statistics.median(run["peak_mib"] for run in runs)
        lines.append(
            f"| {dtype} | {variant} | {peak:.0f} | {middle:.1f} ({min(seconds):.1f} - {max(seconds):.1f}) "
            f"| {middle / unit:.2f} | {runs[0]['logprob_error']:.1e} | {runs[0]['grad_error']:.1e} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("tokens", 4096), ("vocab", 151936), ("hidden", 512), ("chunk", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--entropy-grad", action="store_true")
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), help="only this one")
    parser.add_argument("--variant", choices=sorted(VARIANTS), help="measure this one, in this process")
    args = parser.parse_args()
    if args.variant:
        sys.stdout.write(json.dumps(measure(args)) + "\n")
        return
    variants = [name for name in VARIANTS if name not in PEERS or importlib.util.find_spec(name)]
    dtypes = [args.dtype] if args.dtype else ["float32", "bfloat16"]
    results: dict[tuple[str, str], list[dict[str, float]]] = {(d, v): [] for d in dtypes for v in variants}
    for repeat in range(args.repeats):
        for dtype, variant in results:
            result = run_child(args, variant, dtype)
            results[dtype, variant].append(result)
            sys.stderr.write(f"{repeat + 1}/{args.repeats} {dtype} {variant} {result}\n")
    sys.stdout.write(table(results, args) + "\n")


if __name__ == "__main__":
    main()
