"""YAML of a file that others may have written -> plain values, with a bound on what a few lines can grow into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

MAX_VALUES = 100_000
"""Values in a document; a resolved config has some hundreds. An alias counts as often as it is used."""
MAX_DEPTH = 100


def _place(mark: Any) -> str:
    """ ", line 3, column 5", counted from 1, of a place of PyYAML; empty for None."""
    return "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"


def load_yaml(text: str) -> Any:
    """The document in `text`, with the values of JSON and dates. Raises ValueError if it cannot be read, or is too big.

    A document of ten lines, each of ten aliases to the line before, holds ten thousand million values: whoever walks
    through it does not come to an end.
    """
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if (count := _count(node, {}, depth=0)) > MAX_VALUES:
            raise ValueError(f"its aliases stand for {count:.3g} values, at most {MAX_VALUES:,} are read")
        return loader.construct_document(node)
    except ValueError:
        raise
    except yaml.MarkedYAMLError as error:
        context = f" ({error.context}{_place(error.context_mark)})" if error.context else ""
        raise ValueError(
            f"it is not YAML that can be read{_place(error.problem_mark)}: {error.problem}{context}"
        ) from error
    except Exception as error:  # PyYAML lets errors of all kinds through for a value that contradicts its tag
        reason = "; ".join(line.strip() for line in str(error).splitlines())
        raise ValueError(f"it is not YAML that can be read: {type(error).__name__}: {reason}") from error
    finally:
        loader.dispose()


def leaves(value: object, path: Sequence[str] = ()) -> Iterator[tuple[list[str], object]]:
    """Path and value of every leaf below `path` in nested mappings; an empty mapping is a leaf."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, [*path, str(name)])
    else:
        yield [*path], value


def _count(node: yaml.Node, counted: dict[int, int], *, depth: int) -> int:
    """Number of values of `node` with every alias written out; `counted` holds the nodes that were counted before."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep, or contains itself")
    if id(node) not in counted:
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = [one for pair in node.value for one in pair]
        counted[id(node)] = 1 + sum(_count(one, counted, depth=depth + 1) for one in inner)
    return counted[id(node)]
