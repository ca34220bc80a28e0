"""A recorded step and a model -> the gradients of the parameters that each mode asks for, and how sure they are.

The gradient of a mode is a sum over groups: the backward pass is linear in the gradient by the log-probs, which
`trainer/replay/score.py` has for every token. So each group is scored once, in the packed forward of training, and
differentiated once per mode; cosines, and what happens when groups are drawn again (bootstrap), follow from the inner
products of these vectors. Denominators and self-normalisation are those of the groups that were drawn.

The model should hold the weights that the step started with; `GradientReport.logprob_gap` says how far off they are.
With several optimizer steps the gradients of all of them are taken at these weights and added up.

G: groups, M: modes, P: parameters, D: numbers kept of a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algorithms.config import Aggregation
from trainer.batch.train_batch import MicroBatch, MiniBatch, TokenScores
from trainer.config.train import TrainConfig
from trainer.policy.forward import ScoringModel
from trainer.policy.micro_loss import NUM_COUNTS, step_factor
from trainer.policy.recorder import OF_BATCH
from trainer.replay.compare import Matrix, cosines_of_products
from trainer.replay.modes import Mode
from trainer.replay.recorded import RecordedStep, make_micro
from trainer.replay.score import Place, fitted, prepared, score_micro
from trainer.replay.weights import LoadedPolicy

MAX_NUMBERS = 2**20
"""Numbers kept of a gradient. A larger one is multiplied with random signs and folded into this many sums, which keeps
inner products up to 1 / sqrt(MAX_NUMBERS) = 0.1 % of the lengths."""
_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientReport:
    """True gradients of some modes. Shares are of the squared length of the gradient of the whole step."""

    weights: str
    """Those of the model, in words."""
    names: list[str]
    cosines: Matrix
    """[M][M]."""
    cosine_spread: list[float | None]
    """[M] standard deviation over the draws of the cosine with the first mode."""
    norms: list[float]
    """[M] L2 norm."""
    relative_variance: list[float | None]
    """[M] mean squared distance of the gradients of the draws from their mean / squared norm."""
    num_groups: int
    num_draws: int
    is_exact: bool
    """Whether every parameter was kept; else see `MAX_NUMBERS`."""
    logprob_gap: tuple[float, float]
    """Mean and maximum of |log-prob of the model - log-prob at the loss|, over the tokens of the first optimizer
    step."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Group:
    """A group of the step as one micro-batch."""

    micro: MicroBatch
    scores: TokenScores
    place: Place

    @property
    def index(self) -> int:
        """Its optimizer step."""
        return self.place.number


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Vectors:
    """What is left of the model: everything else is arithmetic on these."""

    products: Tensor
    """[M, G, M, G] float64 inner products of the groups' gradients."""
    counts: Tensor
    """[M, G, NUM_COUNTS] float64."""


def gradient_report(
    modes: Sequence[Mode],
    step: RecordedStep,
    policy: LoadedPolicy,
    *,
    draws: int,
    say: Callable[[str], None],
) -> GradientReport:
    """Compare the gradients of `modes`, none of them refused; `say` is told of the progress."""
    model, configs = policy.model, [fitted(mode) for mode in modes]
    groups = [list(_groups(mode, step)) for mode in modes]
    vectors, gap = _vectors(configs, groups, model, say=say)
    whole = torch.ones(1, len(groups[0]), dtype=torch.float64)
    generator = torch.Generator().manual_seed(_SEED)
    weights = torch.stack([_factors(config, groups[0], vectors.counts[m], whole) for m, config in enumerate(configs)])
    drawn = _draws(groups[0], draws, generator)
    drawn_weights = torch.stack(
        [_factors(config, groups[0], vectors.counts[m], drawn) for m, config in enumerate(configs)]
    )
    of_step = torch.einsum("axg,agbh,bxh->xab", weights, vectors.products, weights)[0]
    of_draws = torch.einsum("axg,agbh,bxh->xab", drawn_weights, vectors.products, drawn_weights)
    squares = of_step.diagonal()
    return GradientReport(
        weights=policy.description,
        names=[mode.name for mode in modes],
        cosines=cosines_of_products(of_step),
        cosine_spread=_cosine_spread(of_draws),
        norms=squares.clamp(min=0).sqrt().tolist(),
        relative_variance=_relative_variance(drawn_weights, vectors.products, squares),
        num_groups=len(groups[0]),
        num_draws=draws,
        is_exact=_num_parameters(model) <= MAX_NUMBERS,
        logprob_gap=gap,
    )


# ---------------------------------------------------------------- groups


def _groups(mode: Mode, step: RecordedStep) -> Iterator[_Group]:
    """Every group of the step as one micro-batch, as `mode` would have it, in the order of the run."""
    ranks = prepared(mode, step)
    for index in range(step.num_optimizer_steps):
        pieces: dict[int, list[tuple[MicroBatch, TokenScores, int]]] = {}
        for rank, minis in enumerate(ranks):
            micros = minis[index].micro_batches
            for micro, scores in zip(micros, step.ranks[rank][index].scores, strict=True):
                # A rank without samples trains on one token that is no sample.
                for place in range(len(micro.sample_keys)):
                    group = int(step.samples.group_ids[micro.sample_numbers[place]])
                    pieces.setdefault(group, []).append((micro, scores, place))
        for group in sorted(pieces):
            micro, scores = _joined(pieces[group])
            of_step = Place(mini=ranks[0][index], number=index, samples=step.samples)
            yield _Group(micro=micro, scores=scores, place=of_step)


def _joined(pieces: Sequence[tuple[MicroBatch, TokenScores, int]]) -> tuple[MicroBatch, TokenScores]:
    """Single sequences of micro-batches, laid end to end."""
    slices = [slice(int(micro.cu_seqlens[at]), int(micro.cu_seqlens[at + 1])) for micro, _, at in pieces]
    lengths = torch.tensor([0, *(part.stop - part.start for part in slices)])
    per_token = {}
    for name in OF_BATCH:
        columns = [getattr(micro, name) for micro, _, _ in pieces]
        if name == "token_lags" and any(column is None for column in columns):
            continue  # nothing in the loss reads them
        if columns[0] is not None:
            per_token[name] = torch.cat([column[part] for column, part in zip(columns, slices, strict=True)])
    pairs = list(zip(pieces, slices, strict=True))
    micro = make_micro(
        torch.cat([micro.token_ids[part] for (micro, _, _), part in pairs]),
        lengths.cumsum(0).to(torch.int32),
        torch.cat([micro.response_mask[part] for (micro, _, _), part in pairs]),
        sample_keys=[micro.sample_keys[at] for micro, _, at in pieces],
        sample_numbers=torch.stack([micro.sample_numbers[at] for micro, _, at in pieces]),
        per_token=per_token,
    )
    scores = TokenScores(
        logprobs=torch.cat([scores.logprobs[part] for (_, scores, _), part in pairs]),
        entropy=torch.cat([scores.entropy[part] for (_, scores, _), part in pairs]),
        floor_delta=None,
    )
    return micro, scores


# ---------------------------------------------------------------- vectors


def _vectors(
    configs: Sequence[TrainConfig],
    groups: Sequence[Sequence[_Group]],
    model: ScoringModel,
    *,
    say: Callable[[str], None],
) -> tuple[_Vectors, tuple[float, float]]:
    """Gradients of every group under every mode -> their inner products; `groups[m]` are those of mode m."""
    num_modes, num_groups = len(configs), len(groups[0])
    kept = torch.empty(num_modes, num_groups, min(_num_parameters(model), MAX_NUMBERS))
    counts = torch.zeros(num_modes, num_groups, NUM_COUNTS, dtype=torch.float64)
    fold = _Fold(model)
    gap_sum, gap_max, gap_tokens = 0.0, 0.0, 0
    for g, group in enumerate(groups[0]):
        scores = model(group.micro, temperature=configs[0].sampling.temperature)
        if group.index == 0:
            apart = (scores.logprobs.detach() - group.scores.logprobs)[group.micro.response_mask].abs()
            gap_sum, gap_tokens = gap_sum + float(apart.sum()), gap_tokens + apart.numel()
            gap_max = max(gap_max, float(apart.max()) if apart.numel() else 0.0)
        for m, config in enumerate(configs):
            own = groups[m][g]
            part = score_micro(config, own.micro, own.scores, place=own.place, totals=None)
            counts[m, g] = part.counts
            kept[m, g] = fold.gradient(scores.logprobs, part.gradient)
        say(f"gradients: {g + 1} of {num_groups} groups")
    flat = kept.view(num_modes * num_groups, -1)
    products = torch.zeros(len(flat), len(flat), dtype=torch.float64)
    for part in flat.split(2**16, dim=1):
        wide = part.double()
        products += wide @ wide.T
    shape = (num_modes, num_groups, num_modes, num_groups)
    gap = (gap_sum / gap_tokens if gap_tokens else 0.0, gap_max)
    return _Vectors(products=products.view(shape), counts=counts), gap


class _Fold:
    """Gradients of a model as vectors of at most MAX_NUMBERS numbers."""

    def __init__(self, model: ScoringModel) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._size = sum(parameter.numel() for parameter in self._parameters)
        self._signs: Tensor | None = None
        if self._size > MAX_NUMBERS:
            generator = torch.Generator().manual_seed(_SEED)
            # One random bit per parameter, as bytes of -1 and 1.
            self._signs = torch.randint(0, 2, (self._size,), generator=generator, dtype=torch.int8) * 2 - 1

    def gradient(self, logprobs: Tensor, by_logprobs: Tensor) -> Tensor:
        """The gradient of sum(by_logprobs x logprobs) by the parameters, folded -> [D] float32."""
        found = torch.autograd.grad(
            logprobs, self._parameters, grad_outputs=by_logprobs, retain_graph=True, materialize_grads=True
        )
        if self._signs is None:
            return torch.cat([part.flatten() for part in found])
        folded, start = torch.zeros(MAX_NUMBERS), 0
        for part in found:
            signed = part.flatten() * self._signs[start : start + part.numel()]
            # Entry i of the whole gradient goes to sum i modulo MAX_NUMBERS.
            first = start % MAX_NUMBERS
            last = -(first + len(signed)) % MAX_NUMBERS
            padded = torch.cat([signed.new_zeros(first), signed, signed.new_zeros(last)])
            folded += padded.view(-1, MAX_NUMBERS).sum(0)
            start += part.numel()
        return folded


def _num_parameters(model: ScoringModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


# ---------------------------------------------------------------- draws


def _draws(groups: Sequence[_Group], draws: int, generator: torch.Generator) -> Tensor:
    """How often each draw takes each group [draws, G] float64: as many groups per optimizer step as there are."""
    counts = torch.zeros(draws, len(groups), dtype=torch.float64)
    for index in sorted({group.index for group in groups}):
        members = torch.tensor([g for g, group in enumerate(groups) if group.index == index])
        taken = members[torch.randint(len(members), (draws, len(members)), generator=generator)]
        counts.scatter_add_(1, taken, torch.ones_like(taken, dtype=torch.float64))
    return counts


def _factors(config: TrainConfig, groups: Sequence[_Group], counts: Tensor, taken: Tensor) -> Tensor:
    """What each group's gradient is multiplied with in each draw -> [draws, G]; `taken` [draws, G] are their numbers.

    The losses of the groups have the denominators of the whole optimizer step: they are replaced by those of what was
    drawn, and `step_factor` says the rest, as it does in training.
    """
    tokens = torch.tensor([float(group.micro.response_mask.sum()) for group in groups], dtype=torch.float64)
    sequences = torch.tensor([float(len(group.micro.sample_keys)) for group in groups], dtype=torch.float64)
    factors = torch.zeros_like(taken)
    for index in sorted({group.index for group in groups}):
        members = torch.tensor([group.index == index for group in groups])
        mini = next(group.place.mini for group in groups if group.index == index)
        for d, row in enumerate(taken * members):
            drawn = replace(
                mini, num_response_tokens=int(row @ tokens), num_sequences=int(row @ sequences), micro_batches=[]
            )
            factor = step_factor(config, row @ counts, drawn).gradient
            factors[d] += row * factor * _denominator(config, mini) / _denominator(config, drawn)
    return factors


def _denominator(config: TrainConfig, mini: MiniBatch) -> float:
    """What the losses of a mini-batch are divided by, up to a constant."""
    match config.loss.aggregation:
        case Aggregation.token_mean:
            return float(mini.num_response_tokens)
        case Aggregation.token_sum:
            return 1.0
        case _:
            return float(mini.num_sequences)


def _cosine_spread(products: Tensor) -> list[float | None]:
    """Standard deviation over draws of the cosine with the first mode, from inner products [draws, M, M]."""
    lengths = products.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    spreads: list[float | None] = []
    for m in range(products.shape[1]):
        usable = (lengths[:, 0] > 0) & (lengths[:, m] > 0)
        values = (products[:, 0, m] / (lengths[:, 0] * lengths[:, m]))[usable]
        spreads.append(float(values.std()) if len(values) > 1 else None)
    return spreads


def _relative_variance(weights: Tensor, products: Tensor, squares: Tensor) -> list[float | None]:
    """E|g - E g|^2 / |g of the step|^2 over draws, from weights [M, draws, G]."""
    centred = weights - weights.mean(dim=1, keepdim=True)
    found: list[float | None] = []
    for m, square in enumerate(squares.tolist()):
        spread = torch.einsum("xg,gh,xh->x", centred[m], products[m, :, m], centred[m]).mean()
        found.append(float(spread) / square if square > 0 and math.isfinite(float(spread)) else None)
    return found
