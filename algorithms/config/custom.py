"""`Custom`, the base of every choice that stands in a user's own file, in place of a built-in one.

A recipe names the class as `path/to/file.py:Name` where the name of a built-in choice could stand. The class is a
dataclass: its fields are keys of the config, with rules and defaults like any other; its class variables say what it
needs; an instance is called like the function of a built-in choice. docs/extend.md has an example of every kind.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from algorithms.config.rules import Checked, as_yaml

if TYPE_CHECKING:
    from torch import Tensor

    from algorithms.tokens import Tokens

PARTS = frozenset({"rho", "train", "weight", "ratio", "anchor", "kept"})
"""What may stand in the braces of a formula beside the keys of the class; each kind has some of them."""
USE = "use"
"""Key of the mapping that names a choice of the user's own together with its keys: {use: file.py:Name, cap: 2}."""


@dataclass(kw_only=True, slots=True)
class Custom(Checked):
    """A choice of a user: a subclass of one of the kinds below, for example `CustomCriterion` or `CustomLoss`."""

    source: ClassVar[str] = ""
    """`path/to/file.py:Name` as the recipe has it; set when the file is loaded."""
    formula: ClassVar[str] = ""
    """The part of the objective line that it stands for, with keys in braces: "min({weight}, {cap:g})". Empty: the name
    of the class with its keys. What else may stand in braces is said by each kind."""

    def text(self, **parts: str) -> str:
        """The formula with the values of the keys, and with the `parts` of the line around it."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        if self.formula:
            return self.formula.format(**values, **parts)
        shown = [*parts.values(), *(f"{name}={as_yaml(value)}" for name, value in values.items())]
        return f"{type(self).__name__}({', '.join(shown)})"

    def answer(self, *given: Any, **more: Any) -> Any:
        """What a call of the instance returns. Raises ValueError, with the name, if the call writes into what it is
        given: metrics and loss read the same tensors."""
        before = list(_versions((*given, *more.values())))
        try:
            result = self(*given, **more)  # type: ignore[operator]  # the kinds declare it
        except SystemExit as error:  # it would end a process without a word
            raise RuntimeError(f"{self.source or self.name} called sys.exit({error.code})") from error
        if list(_versions((*given, *more.values()))) != before:
            way = "use operations without a trailing _, or a clone()"
            raise ValueError(f"{self.source or self.name} must not change the tensors that it gets: {way}")
        return result

    def fitting(self, values: Tensor, like: Tensor, *, finite: bool = False) -> Tensor:
        """What the user's code returned, of the shape and on the device of `like`, bool if that is, with a gradient if
        that has one; with `finite`, which reads the device, without NaN and infinity. Raises ValueError, with the name,
        otherwise."""
        must = f"{self.source or self.name} must return"
        is_tensor = hasattr(values, "requires_grad")
        if not is_tensor or values.shape != like.shape:
            got = list(values.shape) if is_tensor else type(values).__name__
            raise ValueError(f"{must} {list(like.shape)} values, got {got}")
        if values.device != like.device:
            raise ValueError(f"{must} values on {like.device}, got {values.device}")
        if str(like.dtype) == "torch.bool" != str(values.dtype):
            raise ValueError(f"{must} bool where it says which tokens, got {values.dtype}")
        if like.requires_grad and not values.requires_grad:
            raise ValueError(f"{must} values with a gradient with respect to the log-probs, and these have none")
        bad = int((~values.detach().isfinite()).sum()) if finite else 0
        if bad:
            raise ValueError(f"{must} finite values, and {bad} of {values.numel()} are not")
        return values

    @property
    def name(self) -> str:
        """Name of the class, as metrics and messages show it; a built-in choice has one too."""
        return type(self).__name__


@dataclass(kw_only=True, slots=True)
class CustomMetric(Custom):
    """A metric of a user: the mean of a value over the valid tokens of a step, of all ranks."""

    @property
    def key(self) -> str:
        """Name of the metric: own/ and the name of the class."""
        return f"own/{self.name}"

    @abstractmethod
    def __call__(self, tokens: Tokens) -> Tensor:
        """The value of each token, [T]; what it is off tokens.valid does not matter."""
        raise NotImplementedError


def _versions(parts: Iterable[Any]) -> Iterator[int]:
    """How often each tensor among `parts`, records of tensors, and what these derive from them, was written to."""
    for part in parts:
        if hasattr(part, "is_inference"):
            yield 0 if part.is_inference() else part._version  # it has none there
        else:
            yield from _versions(part if isinstance(part, tuple) else getattr(part, "tensors", list)())


def written(value: object) -> object:
    """A value of a config as a recipe writes it, where it is a choice of the user's own, or a list of them."""
    if isinstance(value, list):
        return [written(item) for item in value]
    if not isinstance(value, Custom):
        return value
    keys = {spec.name: getattr(value, spec.name) for spec in fields(value)}
    return {USE: value.source, **keys} if keys else value.source
