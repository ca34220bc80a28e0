"""Which single tensor explains a difference: scaled, missing, exchanged with another one, or left at older numbers.

A model has hundreds of tensors and tens of thousands of pairs, so all are ranked by their first-order effect on the
log-probs, and only the best are tried. To first order a wrong tensor changes the log-probs by J D: J is the Jacobian
with respect to the tensor, D the wrong numbers less the right ones. Of the difference r, J D takes away
2 r . J D - |J D|^2, and the best multiple of J D takes away (r . J D)^2 / |J D|^2. One backward pass gives r . J D for
all tensors; |J D|^2 is the mean of (v . J D)^2 over random signs v, a backward pass each.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from trainer.diagnose.case import Candidate, Case, Number
from trainer.diagnose.scoring import EditKind, Scoring, TensorEdit

PROBES = 12
"""Random signs: the standard error of |J D|^2 is 40 %, which is enough for a ranking."""
TRIED = 16
"""Edits of each kind that are tried after the ranking."""
FEW_TENSORS = 64
"""Models with no more tensors have every edit tried."""
FITTED = 6
"""Tensors whose factor is fitted."""
FACTORS = (0.0, 0.5, 0.8, 1.25, 2.0)
BEYOND = (-2.0, 1.0, 4.0)
"""Further ends of the stretches between which a factor is fitted."""
FACTOR_STEPS = 14
NEAR_ZERO = 0.05
"""A factor below this is zero if that fits as well, but for this share of the misfit."""
EQUAL = 1.05
"""Causes whose misfits differ by less than this factor cannot be told apart."""
CLOSE = 0.01
"""Nor can those that leave less than this share of the misfit: fitted factors are not exact."""
Key = TypeVar("Key")
LAYER = re.compile(r"^(.*\.layers\.)(\d+)\.")


@dataclass(frozen=True, slots=True)
class Found:
    """An edit that was tried."""

    edits: tuple[TensorEdit, ...]
    misfit: float


def wrong_tensors(case: Case, base: Scoring) -> list[Candidate]:
    """The best candidate, if any, with those that look like it. `case` should have few tokens: it is scored often."""
    before = case.total(base)
    found = [Found(edits, case.total(base.with_edits(*edits))) for edits in _Ranking(case, base).ranked()]
    scaled = [each for each in found if each.edits[0].kind is EditKind.scaled]
    scaled.sort(key=lambda each: each.misfit)
    best_factors = {each.edits[0].name: each.edits[0].factor for each in reversed(scaled)}
    fitted = list(dict.fromkeys(each.edits[0].name for each in scaled))[:FITTED]
    found += [_fitted(case, base, name, best_factors[name], before) for name in fitted]
    found.sort(key=lambda each: each.misfit)
    if not found:
        return []
    first, *others = found
    close = max(EQUAL * first.misfit, CLOSE * before)
    alike = [each.edits for each in others if each.misfit <= close and _key(each.edits) != _key(first.edits)]
    words = dict.fromkeys(
        _words(edits, case.scorer.names) for edits in {_key(edits): edits for edits in alike}.values()
    )
    return [_candidate(base, first, tuple(words), case.scorer.names)]


def _key(edits: Sequence[TensorEdit]) -> frozenset[tuple[object, ...]]:
    """The same for two factors of a tensor."""
    return frozenset((edit.name, edit.kind, edit.other, edit.source) for edit in edits)


def _fitted(case: Case, base: Scoring, name: str, start: float, before: float) -> Found:
    """The factor of a tensor that fits best, near the best of FACTORS; `before` is the misfit without one."""
    around = sorted({*FACTORS, *BEYOND})
    place = around.index(start)
    low, high = around[place - 1], around[place + 1]

    def scaled(factor: float) -> Scoring:
        return base.with_edits(TensorEdit(name=name, kind=EditKind.scaled, factor=factor))

    factor, total = case.fitted(scaled, low, high, steps=FACTOR_STEPS)
    if abs(factor) < NEAR_ZERO and (at_zero := case.total(scaled(0.0))) <= total * EQUAL + NEAR_ZERO * before:
        factor, total = 0.0, at_zero
    return Found((TensorEdit(name=name, kind=EditKind.scaled, factor=factor),), total)


class _Ranking:
    """First-order effects of all edits on the log-probs of a few tokens."""

    def __init__(self, case: Case, base: Scoring) -> None:
        self._scorer = case.scorer
        self._tensors = case.scorer.tensors(base.body.weights)
        older = range(1, case.scorer.num_weights)
        self._older = {
            (source, name): tensor - self._tensors[name]
            for source in older
            for name, tensor in case.scorer.tensors(source).items()
            if not torch.equal(tensor, self._tensors[name])
        }
        self._shapes: dict[torch.Size, list[str]] = defaultdict(list)
        for name, tensor in self._tensors.items():
            if LAYER.match(name):
                self._shapes[tensor.shape].append(name)
        self._effects = self._measured(case, base)

    def _measured(self, case: Case, base: Scoring) -> list[_Effects]:
        """v . J D of every edit, first for the difference as v, then for random signs."""
        logprobs, parameters = self._scorer.forward(replace(base, shift=0))
        difference = (case.target - logprobs.detach().cpu().double()).clamp(-1, 1)
        difference = torch.where(case.mask, difference, 0.0).nan_to_num(0.0)
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (PROBES, len(logprobs)), generator=generator) * 2 - 1
        vectors = [difference, *(signs * case.mask)]
        effects: list[_Effects] = []
        for number, vector in enumerate(vectors):
            grads = torch.autograd.grad(
                logprobs,
                list(parameters.values()),
                vector.to(logprobs),
                retain_graph=number + 1 < len(vectors),
                allow_unused=True,
            )
            found = zip(parameters, grads, strict=True)
            effects.append(self._effects_of({name: grad for name, grad in found if grad is not None}))
        for each in parameters.values():
            each.requires_grad_(False)
        return effects

    def _effects_of(self, grads: dict[str, Tensor]) -> _Effects:
        """Numbers in place of gradients, which are as large as the model."""
        grams: dict[torch.Size, Tensor] = {}
        for shape, names in self._shapes.items():
            there = [name for name in names if name in grads]
            if len(there) == len(names) > 1:
                flat = torch.stack([self._tensors[name].flatten() for name in names])
                gram = (torch.stack([grads[name].flatten() for name in names]) @ flat.T).double()
                own = gram.diagonal()
                grams[shape] = gram - own[:, None] + (gram - own[:, None]).T
        return _Effects(
            scaled={name: float((grad * self._tensors[name]).sum()) for name, grad in grads.items()},
            older={key: float((grads[key[1]] * step).sum()) for key, step in self._older.items() if key[1] in grads},
            exchanged=grams,
        )

    def ranked(self) -> list[tuple[TensorEdit, ...]]:
        """Edits worth trying."""
        tried: list[tuple[TensorEdit, ...]] = []
        most = TRIED if len(self._tensors) > FEW_TENSORS else len(self._tensors) ** 2
        for name in _best(self._scale_gains(), most):
            tried += [(TensorEdit(name=name, kind=EditKind.scaled, factor=factor),) for factor in FACTORS]
        for one, other in _best(self._exchange_gains(), most):
            first = TensorEdit(name=one, kind=EditKind.exchanged, other=other)
            second = TensorEdit(name=other, kind=EditKind.exchanged, other=one)
            tried += [(first, second), (first,), (second,)]
        for source, name in _best(self._older_gains(), most):
            tried.append((TensorEdit(name=name, kind=EditKind.older, source=source),))
        for source, layer in _best(self._layer_gains(), most):
            names = layers_of(self._tensors)[layer]
            tried.append(tuple(TensorEdit(name=name, kind=EditKind.older, source=source) for name in names))
        return tried

    def _scale_gains(self) -> dict[str, float]:
        names = self._effects[0].scaled
        return {name: _gain([each.scaled[name] for each in self._effects], any_multiple=True) for name in names}

    def _older_gains(self) -> dict[tuple[int, str], float]:
        keys = self._effects[0].older
        return {key: _gain([each.older[key] for each in self._effects], any_multiple=False) for key in keys}

    def _layer_gains(self) -> dict[tuple[int, str], float]:
        gains: dict[tuple[int, str], float] = {}
        for source in range(1, self._scorer.num_weights):
            for layer, names in layers_of(self._tensors).items():
                products = [sum(each.older.get((source, name), 0.0) for name in names) for each in self._effects]
                gains[source, layer] = _gain(products, any_multiple=False)
        return gains

    def _exchange_gains(self) -> dict[tuple[str, str], float]:
        gains: dict[tuple[str, str], float] = {}
        for shape, names in self._shapes.items():
            if shape not in self._effects[0].exchanged:
                continue
            products = torch.stack([each.exchanged[shape] for each in self._effects])
            for one, other in itertools.combinations(range(len(names)), 2):
                if _can_be_confused(names[one], names[other]):
                    gains[names[one], names[other]] = _gain(products[:, one, other].tolist(), any_multiple=True)
        return gains


@dataclass(frozen=True, kw_only=True, slots=True)
class _Effects:
    """v . J D of one vector v, by edit."""

    scaled: dict[str, float]
    older: dict[tuple[int, str], float]
    exchanged: dict[torch.Size, Tensor]
    """Of each shape, [tensors, tensors]."""


def _gain(products: Sequence[float], *, any_multiple: bool) -> float:
    """v . J D, first for the difference r as v, then for random signs -> what J D, or its best multiple, takes away of
    |r|^2.
    """
    along, *random = products
    size = max(sum(each * each for each in random) / len(random), 1e-30)
    return along * along / size if any_multiple else 2 * along - size


def _can_be_confused(one: str, other: str) -> bool:
    """True for the same tensor of two layers, and for two of a kind in one module: k_proj.weight and v_proj.weight."""
    first, second = LAYER.sub("", one), LAYER.sub("", other)
    if first == second:
        return True
    module, _, kind = first.rpartition(".")
    other_module, _, other_kind = second.rpartition(".")
    same_layer = LAYER.match(one)[0] == LAYER.match(other)[0]  # type: ignore[index]
    return same_layer and kind == other_kind and module.rpartition(".")[0] == other_module.rpartition(".")[0]


def layers_of(names: Sequence[str] | dict[str, Tensor]) -> dict[str, list[str]]:
    """Layer, as "layer 3" -> names of its tensors."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if match := LAYER.match(name):
            found[f"layer {match[2]}"].append(name)
    return found


def _best(scores: dict[Key, float], count: int) -> list[Key]:
    return sorted(scores, key=scores.__getitem__, reverse=True)[:count]


def _candidate(base: Scoring, found: Found, alike: tuple[str, ...], weights: Sequence[str]) -> Candidate:
    kinds = {edit.kind for edit in found.edits}
    [kind] = kinds
    names = {
        EditKind.scaled: "missing tensor" if found.edits[0].factor == 0 else "scaled tensor",
        EditKind.exchanged: "exchanged tensors",
        EditKind.older: "old tensor",
    }
    remedies = {
        EditKind.scaled: "the scale of this tensor where weights are sent, quantised or fused",
        EditKind.exchanged: "the names of these tensors where weights are sent",
        EditKind.older: "the list of tensors that are sent at a sync",
    }
    return Candidate(
        name=names[kind],
        what=_words(found.edits, weights),
        remedy=remedies[kind],
        scoring=base.with_edits(*found.edits),
        least_gain=0.5,
        alike=alike,
        number=_factor(found.edits[0], weights) if found.edits[0].factor and kind is EditKind.scaled else None,
    )


def _factor(edit: TensorEdit, weights: Sequence[str]) -> Number:
    """The factor of a scaled tensor."""

    def factor(scoring: Scoring) -> float:
        return next(each.factor for each in scoring.body.edits if each.name == edit.name)

    return Number(
        get=factor,
        put=lambda scoring, value: scoring.with_edits(replace(edit, factor=value)),
        what=lambda value: _words([replace(edit, factor=value)], weights),
        shown=lambda value: f"{value:.4g}",
    )


def _words(edits: Sequence[TensorEdit], weights: Sequence[str]) -> str:
    """What a side does, without a subject; `weights` are the names of the weights by number."""
    first = edits[0]
    match first.kind:
        case EditKind.scaled if first.factor == 0:
            return f"holds zeros in {first.name}"
        case EditKind.scaled:
            return f"holds {first.name} multiplied by {first.factor:.3g}"
        case EditKind.exchanged if len(edits) == 2:
            return f"holds {first.name} and {first.other} exchanged"
        case EditKind.exchanged:
            return f"holds the numbers of {first.other} in {first.name}"
    where = first.name if len(edits) == 1 else f"all tensors of {next(iter(layers_of([first.name])))}"
    return f"holds the numbers of the weights {weights[first.source]} in {where}"
