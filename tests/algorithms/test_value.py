"""The clipped value loss and its statistics against numbers worked by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.value import ValueLossOutput, value_loss

# Old value 1 everywhere, clip 0.5. Token: value, return -> error squared, clipped error squared.
# 0: 1.25, 2.0 -> 0.5625, same (inside the range).
# 1: 2.00, 3.0 -> 1, (1.5 - 3)^2 = 2.25: closer to the return than the range is, so clipped, no gradient.
# 2: 2.00, 0.0 -> 4, (1.5 - 0)^2 = 2.25: further away, so the loss is the plain one.
# 3: off the mask.
VALUES = [1.25, 2.0, 2.0, math.nan]
RETURNS = [2.0, 3.0, 0.0, math.inf]
OLD = [1.0, 1.0, 1.0, math.nan]
MASK = [True, True, True, False]
COEFFICIENTS = [1.0, 2.0, 4.0, math.nan]


def evaluate(clip: float | None, **changed: list[Any]) -> tuple[ValueLossOutput, Tensor]:
    """Loss and statistics, and the gradient with respect to the values [T]."""
    given: dict[str, list[Any]] = {"values": VALUES, "old": OLD, "returns": RETURNS, "mask": MASK} | changed
    coefficients = changed.get("coefficients", COEFFICIENTS)
    values = torch.tensor(given["values"], requires_grad=True)
    output = value_loss(
        values,
        old_values=torch.tensor(given["old"]),
        returns=torch.tensor(given["returns"]),
        response_mask=torch.tensor(given["mask"], dtype=torch.bool),
        coefficients=torch.tensor(coefficients),
        clip=clip,
    )
    output.loss.backward()
    assert values.grad is not None
    return output, values.grad


def test_clipped_loss_and_its_gradient() -> None:
    output, gradient = evaluate(0.5)
    assert output.loss.item() == (0.5625 + 2 * 2.25 + 4 * 4) / 2
    assert gradient.tolist() == [1.25 - 2, 0, 4 * 2, 0]
    assert output.loss.dtype == torch.float32


def test_without_a_clip_it_is_the_squared_error() -> None:
    output, gradient = evaluate(None)
    assert output.loss.item() == (0.5625 + 2 * 1 + 4 * 4) / 2
    assert gradient.tolist() == [-0.75, 2 * -1, 4 * 2, 0]
    assert output.stats.metrics()["critic/clip_frac"] == 0


def test_statistics() -> None:
    output, _ = evaluate(0.5)
    metrics = output.stats.metrics(optimizer_steps=2)
    # Residuals R - V_old are 1, 2, -1: variance 2 - 4/9 = 14/9. Returns 2, 3, 0: variance 13/3 - 25/9 = 14/9.
    assert metrics == pytest.approx(
        {
            "critic/loss": (0.5625 + 4.5 + 16) / 4,
            "critic/clip_frac": 1 / 3,
            "critic/explained_variance": 0.0,
            "critic/value_mean": 5.25 / 3,
            "critic/returns_mean": 5 / 3,
            "critic/error_max": 2.0,
            "critic/invalid_tokens": 0,
        }
    )


def test_explained_variance_of_a_perfect_and_of_a_half_right_critic() -> None:
    perfect, _ = evaluate(None, old=[2.0, 3.0, 0.0, 0.0])
    assert perfect.stats.metrics()["critic/explained_variance"] == 1
    half, _ = evaluate(None, returns=[2.0, -2.0, 0.0, 0.0], old=[1.0, -1.0, 0.0, 0.0])
    assert half.stats.metrics()["critic/explained_variance"] == pytest.approx(0.75)
    constant, _ = evaluate(None, returns=[0.9, 0.9, 0.9, 0.0])
    assert constant.stats.metrics()["critic/explained_variance"] is None


def test_statistics_of_micro_batches_add_up() -> None:
    whole, _ = evaluate(0.5)
    lists = {"values": VALUES, "old": OLD, "returns": RETURNS, "mask": MASK, "coefficients": COEFFICIENTS}
    parts = []
    for cut in (slice(0, 1), slice(1, 4)):
        parts.append(evaluate(0.5, **{name: values[cut] for name, values in lists.items()})[0])
    assert sum(part.loss.item() for part in parts) == whole.loss.item()
    assert parts[0].stats.merge(parts[1].stats).metrics() == pytest.approx(whole.stats.metrics())


@pytest.mark.parametrize("name", ["values", "old", "returns"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_is_left_out_and_counted(name: str, bad: float) -> None:
    lists = {"values": VALUES, "old": OLD, "returns": RETURNS}
    output, gradient = evaluate(0.5, **{name: [lists[name][0], bad, *lists[name][2:]]})
    assert output.loss.item() == (0.5625 + 4 * 4) / 2
    assert gradient.tolist() == [-0.75, 0, 8, 0]
    metrics = output.stats.metrics()
    assert metrics["critic/invalid_tokens"] == 1 and metrics["critic/value_mean"] == (1.25 + 2.0) / 2


def test_without_response_tokens_there_is_a_graph_and_no_metric() -> None:
    output, gradient = evaluate(0.5, mask=[False] * 4)
    assert output.loss.item() == 0 and gradient.tolist() == [0] * 4
    metrics = output.stats.metrics()
    assert metrics.pop("critic/loss") == 0 and metrics.pop("critic/invalid_tokens") == 0
    assert set(metrics.values()) == {None}
    empty, _ = evaluate(0.5, values=[], old=[], returns=[], mask=[], coefficients=[])
    assert empty.loss.item() == 0 and empty.stats.metrics()["critic/value_mean"] is None


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="returns must have the shape of response_mask"):
        evaluate(0.5, returns=[1.0])


def test_no_value_is_read_on_the_host() -> None:
    with torch.device("meta"):
        values = torch.empty(9, requires_grad=True)
        output = value_loss(
            values,
            old_values=torch.empty(9),
            returns=torch.empty(9),
            response_mask=torch.empty(9, dtype=torch.bool),
            coefficients=torch.empty(9),
            clip=0.5,
        )
    output.loss.backward()
    merged = output.stats.merge(output.stats)
    assert merged.sums.is_meta and merged.maxes.is_meta
