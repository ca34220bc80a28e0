"""Check 2: the log-prob head against float64, and its time and memory by chunk next to torch's cross entropy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from gpu_check.host import Host, gib, milliseconds
from gpu_check.rows import Row, judged, not_run, noted
from trainer.scoring.logprob_head import HeadOptions, token_logprobs

BOUNDS = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.05, 2e-2)}
"""Dtype of the product -> largest error of a log-prob in nats, largest relative error of a gradient. A logit of
bfloat16 near 4 is a multiple of 1/32, and so is its maximum; the gradient of the logits is rounded to bfloat16."""
CASES: tuple[tuple[str, torch.dtype, float, bool, bool], ...] = (
    ("bfloat16", torch.bfloat16, 1.0, False, False),
    ("bfloat16, T = 0.7", torch.bfloat16, 0.7, False, False),
    ("bfloat16, gradient of the entropy", torch.bfloat16, 1.0, True, False),
    ("policy.fp32_head", torch.bfloat16, 1.0, False, True),
    ("float32", torch.float32, 1.0, True, False),
)
"""Name, dtype, temperature, entropy_grad, float32 product."""
COMPILED_WIDTH = 3584
"""The one width for which torch compiles its cross entropy: that takes half a minute."""


def head(host: Host) -> Iterator[Row]:
    """Values and gradients, then time and peak."""
    for name, dtype, temperature, entropy_grad, float32 in CASES:
        options = HeadOptions(
            temperature=temperature, chunk_tokens=host.pick(256, 16), entropy_grad=entropy_grad, float32=float32
        )
        yield _exactness(host, name, dtype, options)
    for hidden in host.pick((896, 1536, 3584, 5120), (32,)):
        yield from _costs(host, hidden)


def _inputs(host: Host, tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(host.device).manual_seed(0)
    states = torch.randn(tokens, hidden, device=host.device, generator=generator).to(dtype).requires_grad_()
    # Logits of a spread of one.
    weight = torch.randn(vocab, hidden, device=host.device, generator=generator) / hidden**0.5
    targets = torch.randint(vocab, (tokens,), device=host.device, generator=generator)
    return states, targets, weight.to(dtype).requires_grad_()


def _exactness(host: Host, name: str, dtype: torch.dtype, options: HeadOptions) -> Row:
    tokens, width, vocab = host.pick((1024, 896, 32768), (64, 32, 512))
    hidden, targets, weight = _inputs(host, tokens, width, vocab, dtype)
    logprobs, entropy = token_logprobs(hidden, targets, weight, None, options)
    found = torch.autograd.grad((logprobs + options.entropy_grad * entropy).sum(), (hidden, weight))
    exact_hidden, exact_weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    scores = torch.log_softmax(linear(exact_hidden, exact_weight) / options.temperature, dim=-1)
    wanted_logprobs = scores.gather(-1, targets[:, None]).squeeze(-1)
    wanted_entropy = -(scores.exp() * scores).sum(-1)
    total = (wanted_logprobs + options.entropy_grad * wanted_entropy).sum()
    wanted = torch.autograd.grad(total, (exact_hidden, exact_weight))
    with torch.no_grad():
        error = max(float((logprobs - wanted_logprobs).abs().max()), float((entropy - wanted_entropy).abs().max()))
        relative = [float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True)]
    # A gradient leaves in the dtype of the inputs, also after a product in float32.
    of_value = BOUNDS[torch.float32 if options.float32 else dtype][0]
    of_gradient = BOUNDS[dtype][1]
    return judged(
        "2",
        f"head against float64: {name}",
        expected=f"values within {of_value:g} nats, gradients within {of_gradient:g} of their norm",
        measured=f"{error:.2g} nats; by hidden {relative[0]:.2g}, by weight {relative[1]:.2g}",
        ok=error <= of_value and max(relative) <= of_gradient,
        reason="larger than the rounding of the dtype",
    )


def _costs(host: Host, width: int) -> Iterator[Row]:
    """Forward and backward: time and bytes above the inputs."""
    tokens, vocab = host.pick((8192, 151936), (64, 512))
    hidden, targets, weight = _inputs(host, tokens, width, vocab, torch.bfloat16)

    def whole(score: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(score().sum(), (hidden, weight))

    def row(name: str, score: Callable[[], Tensor]) -> Row:
        work = whole(score)
        seconds = host.seconds(work, repeats=3)
        text = f"{milliseconds(seconds)}, {gib(host.peak(work))}"
        return noted("2", f"head, {tokens} tokens of width {width}: {name}", measured=text)

    for chunk in host.pick((512, 1024, 2048, 4096, 8192), (16, 64)):
        options = HeadOptions(temperature=1.0, chunk_tokens=chunk)
        yield row(f"chunk {chunk}", lambda o=options: token_logprobs(hidden, targets, weight, None, o)[0])  # type: ignore[misc]

    def plain(states: Tensor, rows: Tensor) -> Tensor:
        return -cross_entropy(linear(states, rows).float(), targets, reduction="none")

    yield row("plain cross_entropy", lambda: plain(hidden, weight))
    if host.is_cuda and width == COMPILED_WIDTH:
        compiled = torch.compile(plain)
        try:
            yield row("plain cross_entropy, compiled", lambda: compiled(hidden, weight))
        except Exception as error:
            yield not_run("2", "plain cross_entropy, compiled", reason=f"{type(error).__name__}: {error}"[:200])
