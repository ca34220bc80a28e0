"""Configuration of the rejection criteria: a key with a value is a criterion; a token stays if all criteria keep it.

Delta = log pi_train - log mu, rho = exp(Delta). pi_train is pi_old, or the running forward where the correction
compares the running forward (bypass). The function of a criterion is the row of the same name in
`algorithms.rejection.CRITERIA`; the `indicator` is the criterion's factor in the line of `algorithms.objective`. A
criterion reads the advantage if its indicator holds A.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from algorithms.config.custom import Custom
from algorithms.config.rules import Checked, Problem, Rule, above, ruled, within

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.tokens import Tokens

_RATIO = Rule(
    "must be [low, high] with 0 < low <= 1 <= high",
    lambda pair: len(pair) == 2 and 0 < pair[0] <= 1 <= pair[1] and pair[0] != pair[1],
    because="outside these, on-policy tokens are rejected",
)
_RATIO_REMEDY = "Bounds are on rho = pi_train / pi_rollout, for example [0.5, 2.0]."
_PROB_DIFF = Rule(
    "must be [low, high] with -1 <= low <= 0 <= high <= 1",
    lambda pair: len(pair) == 2 and -1 <= pair[0] <= 0 <= pair[1] <= 1 and pair[0] != pair[1],
)


REJECTED_TOKENS, REJECTED_RESPONSES = "rs/token_frac", "rs/seq_frac"
"""Names of the metrics of all criteria together: the share of the tokens, and of the responses, that they reject."""


def rejected_metrics(criterion: str) -> tuple[str, str]:
    """Names of the same metrics of one criterion, by its name."""
    return f"rs/{criterion}_frac", f"rs/{criterion}_seq_frac"


@dataclass(kw_only=True, slots=True)
class CustomCriterion(Custom):
    """A criterion of a user. Its formula is an indicator, which may hold {rho}, {train} (pi_train) and A."""

    @abstractmethod
    def __call__(self, tokens: Tokens) -> Tensor:
        """[T] bool, True where the token is kept. tokens.advantages is set if the formula holds A."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class RejectConfig(Checked):
    """Criteria by which tokens and responses leave the loss. null turns a criterion off."""

    token_ratio: list[float] | None = ruled(
        None, _RATIO, remedy=_RATIO_REMEDY, indicator="1[{low:g} <= {rho} <= {high:g}]"
    )
    """[low, high] of each token's rho, a ratio. Vetted: [0.5, 2.0]."""
    sequence_ratio: list[float] | None = ruled(
        None, _RATIO, remedy=_RATIO_REMEDY, indicator="1[{low:g} <= prod_y({rho}) <= {high:g}]"
    )
    """[low, high] of the product of rho over the response, a ratio; rejects long responses first. Vetted:
    [0.5, 2.0]."""
    geometric_ratio: list[float] | None = ruled(
        None, _RATIO, remedy=_RATIO_REMEDY, indicator="1[{low:g} <= geomean_y({rho}) <= {high:g}]"
    )
    """[low, high] of the geometric mean of rho, a ratio; rejects short responses first. Vetted: [0.999, 1.001]."""
    token_k3: float | None = ruled(None, above(0), indicator="1[K3 <= {bound:g}]")
    """Upper bound of K3 of a token, nats. Vetted: 0.01."""
    mean_k3: float | None = ruled(None, above(0), indicator="1[mean_y(K3) <= {bound:g}]")
    """Upper bound of the mean of K3 over the response, nats. Vetted: 0.01."""
    max_k3: float | None = ruled(None, above(0), indicator="1[max_y(K3) <= {bound:g}]")
    """Upper bound of the largest K3 of the response, nats."""
    veto: float | None = ruled(
        None, within(0, 1, "()"), remedy="Vetted: 1e-4.", indicator="1[min_y({rho}) >= {bound:g}]"
    )
    """Lower bound of rho, a ratio; a response with any token below the bound is rejected as a whole. Vetted: 1e-4."""
    prob_diff: list[float] | None = ruled(
        None, _PROB_DIFF, remedy="Vetted: [-0.2, 0.2].", indicator="1[{low:g} <= {train} - mu <= {high:g}]"
    )
    """[low, high] of pi_train - mu of a token, probabilities. Vetted: [-0.2, 0.2]."""
    mult_err: float | None = ruled(
        None,
        above(1, because="e^|Delta| never is below"),
        remedy="Vetted: 1.5.",
        indicator="1[mean_y(max({rho}, 1/({rho}))) <= {bound:g}]",
    )
    """Upper bound of the mean of e^|Delta| over the response, a ratio >= 1. Vetted: 1.5."""
    dppo_tv: float | None = ruled(None, above(0), indicator="1[sign(A)({train} - mu) <= {bound:g}]")
    """Upper bound of sign(A) (pi_train - mu), a probability difference: rejects a token that has moved too far in the
    direction in which its advantage pushes. Vetted: 0.2."""
    dppo_kl: float | None = ruled(
        None, above(0), indicator="1[A log({rho}) <= 0 or KL_Bernoulli(mu, {train}) <= {bound:g}]"
    )
    """Upper bound of the Bernoulli KL(mu || pi_train) of a token, nats; applies only if pi_train has moved in the
    direction in which the advantage pushes. Vetted: 0.05."""
    opsm: float | None = ruled(None, above(0), indicator="1[A >= 0 or mean_y(-log({rho})) <= {bound:g}]")
    """Upper bound of the mean of -Delta over a response with A < 0, nats per token. Vetted: 0.5 (TRL, which also
    compares with mu)."""
    custom: list[CustomCriterion] = field(default_factory=list)
    """Criteria of your own, each path/to/file.py:Name, or {use: path/to/file.py:Name, key: value}."""

    def active(self) -> list[str]:
        """Names of the criteria in use, in the order of their definition."""
        return [*self._built_in(), *(criterion.name for criterion in self.custom)]

    def indicators(self, rho: str) -> list[str]:
        """The factor of each criterion in use in the objective line, for the ratio `rho`."""
        train, lines = rho.removesuffix("/mu"), []
        for name, indicator in self._built_in().items():
            value = getattr(self, name)
            low, high = value if isinstance(value, list) else (value, value)
            lines.append(indicator.format(rho=rho, train=train, low=low, high=high, bound=value))
        return [*lines, *(criterion.text(rho=rho, train=train) for criterion in self.custom)]

    def reads_advantages(self) -> bool:
        """True if a criterion in use depends on the sign of the advantage."""
        own = [criterion.formula for criterion in self.custom]
        return any(re.search(r"\bA\b", indicator) for indicator in (*self._built_in().values(), *own))

    def _built_in(self) -> dict[str, str]:
        """Built-in criterion in use -> its indicator."""
        rows = {item.name: item.metadata["indicator"] for item in fields(self) if "indicator" in item.metadata}
        return {name: indicator for name, indicator in rows.items() if getattr(self, name) is not None}

    def conflicts(self) -> Iterator[Problem]:
        built_in = [spec.name for spec in fields(self) if "indicator" in spec.metadata]
        names = [*built_in, *(criterion.name for criterion in self.custom)]
        metrics = [REJECTED_TOKENS, REJECTED_RESPONSES, *(each for name in names for each in rejected_metrics(name))]
        for name in sorted({criterion.name for criterion in self.custom}):
            if twice := [each for each in rejected_metrics(name) if metrics.count(each) > 1]:
                rule = "must have criteria whose names make metrics of their own"
                rule += f": mismatch/{twice[0]} of {name} is there twice"
                remedy = "Rename the class, or make a subclass of another name."
                yield Problem(key="custom", rule=rule, value=[each.source for each in self.custom], remedy=remedy)

    def notes(self) -> Iterator[str]:
        """Yield a sentence for every bound that was probably intended for another level or definition."""
        if self.geometric_ratio is not None and (self.geometric_ratio[0] < 0.9 or self.geometric_ratio[1] > 1.1):
            yield f"reject.geometric_ratio={self.geometric_ratio} practically never rejects: peers use [0.999, 1.001]"
        if self.sequence_ratio is not None and (self.sequence_ratio[0] > 0.9 or self.sequence_ratio[1] < 1.1):
            yield f"reject.sequence_ratio={self.sequence_ratio} rejects nearly every response: peers use [0.5, 2.0]"
        if self.opsm is not None and self.opsm < 0.01:
            yield (
                f"reject.opsm={self.opsm:g} is below the noise of a healthy mismatch and rejects at random: it "
                "measures mu against pi_train here, not drift since pi_old, for which miles uses 1e-4"
            )
