"""A Python script with TRL's GRPOConfig, GRPOTrainer and LoraConfig -> its settings. Nothing of it is executed.

Literals, sums, dicts and names of these are read in the order of the script; functions come last. All else, and what
stands in a branch or a class, is `Unread`: it becomes a comment of the recipe, with its source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trainer.compose.peers import OPERATORS, peers

_Node = TypeVar("_Node", bound=ast.AST)
CALLS = {
    "GRPOConfig": ("output_dir",),
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    "LoraConfig": (),
}
"""Class -> its first parameters, which scripts give by position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """What only a run of the script knows; as the key of a dict, entries that are not known."""

    source: str

    def __str__(self) -> str:
        return f"${self.source}"


class Rows(str):
    """A data set of the hub as data.train_path has it."""


Entries = dict[str | Unread, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What a call of one of CALLS makes."""

    kind: str
    fields: Entries
    lines: dict[str | Unread, int]

    def __str__(self) -> str:
        return f"${self.kind}(...)"


class PythonReader:
    """Walks through a script once; `settings`, `lines` and `comments` are what it found."""

    def __init__(self, tree: ast.Module) -> None:
        self.settings: dict[str, object] = {}
        self.lines: dict[str, int] = {}
        self.comments: list[str] = []
        self._names: dict[str, object] = {}
        self._calls = {name: name for name in CALLS}
        self._called: dict[ast.Call, object] = {}
        self._in_branch = False
        self._later: list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, dict[str, object]]] = []
        self._block(tree)
        for function, outer in self._later:  # grows
            self._names = {**outer, **{each.arg: _unread(each) for each in _nodes(function.args, ast.arg)}}
            self._block(function)
        for made in [each for each in self._called.values() if isinstance(each, Made)]:
            for key, value in made.fields.items():
                if isinstance(key, Unread):
                    self._say(made.lines[key], f"{key.source}: only the script knows what it sets in {made.kind}")
                    continue
                if (earlier := self.settings.get(key, value)) != value:
                    self._say(made.lines[key], f"{key} is set to {earlier} and then to {value}, which is read")
                self.settings[key], self.lines[key] = value, made.lines[key]

    def _say(self, line: int, text: str) -> None:
        if (said := f"# line {line}: {text}") not in self.comments:
            self.comments.append(said)

    def _block(self, node: ast.AST, *, in_branch: bool = False) -> None:
        """Read the statements right below a node."""
        before, self._in_branch = self._in_branch, self._in_branch or in_branch
        for statement in ast.iter_child_nodes(node):
            if isinstance(statement, ast.stmt):
                self._statement(statement)
            elif isinstance(statement, ast.excepthandler | ast.match_case):
                self._block(statement)
        self._in_branch = before

    def _statement(self, statement: ast.stmt) -> None:
        heads = [each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.expr | ast.withitem)]
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self._names[name] = Unread(source=name)
                self._later.append((statement, self._names))
                return
            case ast.ImportFrom(names=names):
                self._calls |= {each.asname: each.name for each in names if each.name in CALLS and each.asname}
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=known)) if known in self._calls:
                self._calls[name] = self._calls[known]
                return
            case ast.ClassDef(name=name, bases=bases):
                kinds = [self._calls[_last(base)] for base in bases if _last(base) in self._calls]
                self._calls |= dict.fromkeys([name] * bool(kinds), *kinds[:1])
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if _pair(names, values):
                for target, found, value in zip(names, [self._value(each) for each in values], values, strict=True):
                    self._store(target, found, value)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._store(target, self._value(value), value)
            case ast.AnnAssign(target=target, value=ast.expr() as value, annotation=annotation):
                self._store(target, self._value(value), value)
                heads.remove(annotation)
            case ast.AugAssign(target=target, op=op, value=value):
                both = ast.BinOp(left=target, op=op, right=value)
                self._store(target, self._value(both), both)
            case ast.For(target=target, iter=values) | ast.AsyncFor(target=target, iter=values):
                self._store(target, _unread(values), ast.Compare(left=target, ops=[ast.In()], comparators=[values]))
            case ast.With(items=items) | ast.AsyncWith(items=items):
                for item in items:
                    if item.optional_vars is not None:
                        self._store(item.optional_vars, _unread(item.context_expr), item.context_expr)
        for head in heads:
            self._expression(head, statement)
        straight = isinstance(statement, ast.With | ast.AsyncWith) or (
            heads and ast.unparse(heads[0]).startswith("__name__")
        )
        self._block(statement, in_branch=not straight)

    def _expression(self, node: ast.AST, statement: ast.stmt) -> None:
        """Read the calls in an expression, and say where it names a class of TRL without calling it."""
        before = dict(self._names)
        bound = [name.id for name in _nodes(node, ast.Name) if isinstance(name.ctx, ast.Store)]
        bound += [each.arg for each in _nodes(node, ast.arg)]
        self._names |= {name: Unread(source=name) for name in bound}
        calls = [*_nodes(node, ast.Call)]
        for call in calls:
            self._value(call)
        self._names |= before  # of a lambda or a comprehension, its names are its own
        for each in _nodes(node, ast.NamedExpr):
            self._names[each.target.id] = Unread(source=each.target.id)
        for name in {*_nodes(node, ast.expr)} - {call.func for call in calls}:
            if _last(name) in self._calls:
                self._say(
                    statement.lineno, f"{ast.unparse(statement)}: only the script knows what it sets in {_last(name)}"
                )

    def _store(self, target: ast.expr, value: object, source: ast.expr) -> None:
        if self._in_branch and not isinstance(value, Made):
            value = Unread(source=f"{ast.unparse(source)} in a branch")
        match target:
            case ast.Name(id=name):
                self._names[name] = value
            case ast.Attribute(value=holder, attr=attr):
                self._set(self._value(holder), attr, value, target)
            case ast.Subscript(value=holder, slice=index) if isinstance(known := self._value(holder), dict):
                known[_key(self._value(index), _unread(target))] = _copied(value)
            case _:
                self._names |= {name.id: _unread(source) for name in _nodes(target, ast.Name)}

    def _set(self, holder: object, name: str, value: object, node: ast.expr) -> None:
        if isinstance(holder, Made):
            holder.fields[name], holder.lines[name] = value, node.lineno
        elif peers()["TRL"].row([name]) and not ast.unparse(node).startswith(f"self.{name}"):
            self._say(node.lineno, f"{ast.unparse(node)} is set to {value}: only the script knows what it belongs to")

    def _value(self, node: ast.expr) -> object:
        """The value of an expression; Unread where it is no literal, no sum and no name of these."""
        match node:
            case ast.Constant(value=str() | int() | float() | None as value):
                return value
            case ast.Name(id=name):
                return self._names.get(name, _unread(node))
            case ast.Attribute(value=holder) | ast.Subscript(value=holder):
                known, key = (
                    self._value(holder),
                    node.attr if isinstance(node, ast.Attribute) else self._value(node.slice),
                )
                entries = known.fields if isinstance(known, Made) else known if isinstance(known, dict) else {}
                if isinstance(known, Rows) and isinstance(node, ast.Subscript) and isinstance(key, str):
                    return Rows(f"{known}@{key}")
                other = _unread(node, holder, known)
                is_open = any(isinstance(each, Unread) for each in entries)
                return entries.get(key, other) if isinstance(key, str) and not is_open else other
            case ast.Dict(keys=keys, values=values):
                return self._entries([*zip(keys, values, strict=True)])
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.JoinedStr(values=elements):
                every = [_copied(self._value(each)) for each in elements]
                if not any(isinstance(each, Unread | Made) for each in every):
                    return "".join(map(str, every)) if isinstance(node, ast.JoinedStr) else every
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self._value(value)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return _combined(ast.Sub(), 0, self._value(operand), node)
            case ast.BinOp(left=left, op=op, right=right):
                return _combined(op, self._value(left), self._value(right), node)
            case ast.Call():
                if node not in self._called:
                    self._called[node] = self._call(node)
                return self._called[node]
        return _unread(node)

    def _entries(self, pairs: list[tuple[ast.expr | None, ast.expr]]) -> Entries:
        """A dict of keys with values; the key of `**` is None."""
        entries: Entries = {}
        for key, node in pairs:
            value = _copied(self._value(node))
            spread = "**" * (key is None)
            source = value if isinstance(value, Unread) else _unread(node)
            name = _key(key and self._value(key), Unread(source=f"{spread}{source.source}"))
            entries |= value if spread and isinstance(value, dict) else {name: value}
        return entries

    def _call(self, node: ast.Call) -> object:
        given = self._entries([(ast.Constant(each.arg) if each.arg else None, each.value) for each in node.keywords])
        known = [self._value(each) for each in node.args]
        holder = self._value(node.func.value) if isinstance(node.func, ast.Attribute) else None
        match _last(node.func), known:
            case name, _ if name in self._calls:
                return self._construct(self._calls[name], node, given)
            case "dict", [] | [dict()]:
                return self._entries([(None, each) for each in node.args]) | given
            case "update", _ if isinstance(holder, dict):
                change = self._entries([(None, each) for each in node.args]) | given
                holder |= dict.fromkeys(change, _unread(node)) if self._in_branch else change
            case "setattr", [first, str() as name, value]:
                self._set(first, name, Unread(source=f"{value} in a branch") if self._in_branch else value, node)
            case "load_dataset", [str(), *_]:
                every = [*known, *(given[key] for key in ("name", "split") if key in given)]
                if {"name", "split"}.issuperset(given) and all(isinstance(each, str) for each in every):
                    split = f"@{every.pop()}" if "split" in given else ""
                    return Rows(f"{':'.join(map(str, every))}{split}")
            case "print" | "get" | "items" | "keys" | "values" | "copy", _:
                pass
            case _ if isinstance(holder, Rows):
                self._say(node.lineno, f"{ast.unparse(node)}: its rows are read as {holder}, without this")
                return holder
            case _ if isinstance(holder, dict):
                holder[_unread(node)] = None
            case _ if any(isinstance(each, Made) and each.kind != "GRPOTrainer" for each in (holder, *known)):
                self._say(node.lineno, f"{ast.unparse(node)}: only the script knows what it changes")
        return _unread(node, node.func, self._value(node.func))

    def _construct(self, kind: str, node: ast.Call, given: Entries) -> Made:
        made = Made(kind=kind, fields=given, lines=dict.fromkeys(given, node.lineno))
        made.lines.update({each.arg: each.value.lineno for each in node.keywords if each.arg})
        parameters = () if any(isinstance(each, ast.Starred) for each in node.args) else CALLS[kind]
        for index, each in enumerate(node.args):
            key = _key(parameters[index] if index < len(parameters) else None, _unread(each))
            made.fields[key], made.lines[key] = self._value(each), each.lineno
        if self._in_branch:
            self._say(node.lineno, f"{kind} stands in a branch, which is read as if it were taken")
        return made


def _nodes(node: ast.AST, kind: type[_Node]) -> Iterator[_Node]:
    return (each for each in ast.walk(node) if isinstance(each, kind))


def _pair(targets: Sequence[ast.expr], values: Sequence[ast.expr]) -> bool:
    """True if each of `targets` is assigned the value at its place."""
    return len(targets) == len(values) and not any(isinstance(each, ast.Starred) for each in [*targets, *values])


def _last(node: ast.expr) -> str:
    """`a` of `a` and of `b.a`; empty for others."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _unread(node: ast.AST, begin: ast.AST | None = None, known: object = None) -> Unread:
    """The source of an expression, with that of `known` in the place of `begin`, the name of it."""
    source = ast.unparse(node)
    if begin is not None and isinstance(known, Unread):
        source = known.source + source.removeprefix(ast.unparse(begin))
    return Unread(source=" ".join(source.split()))


def _key(value: object, other: Unread) -> str | Unread:
    return value if isinstance(value, str) else other


def _copied(value: object, depth: int = 3) -> object:
    """A dict or list of its own for each that holds it, so that none grows without bound or holds itself."""
    if not isinstance(value, dict | list):
        return value
    if not depth:
        return Unread(source="what is nested deeper")
    if isinstance(value, dict):
        return {key: _copied(each, depth - 1) for key, each in value.items()}
    return [_copied(each, depth - 1) for each in value]


def _combined(op: ast.operator, left: object, right: object, node: ast.expr) -> object:
    """A sum of numbers, texts, lists or dicts, within what a few lines may grow into."""
    match op, left, right:
        case ast.BitOr(), dict(), dict():
            return left | right
        case ast.Add(), str() | list(), str() | list() if type(left) is type(right):
            if len(left) + len(right) <= 10_000:
                return left + right  # type: ignore[operator]
        case ast.Pow(), int(), int() if 0 <= right < 64 and abs(left) <= 10:
            return left**right
        case _, int() | float(), int() | float() if type(op) in OPERATORS:
            try:
                result = OPERATORS[type(op)](left, right)
            except ArithmeticError:
                return _unread(node)
            return result if abs(result) < 2**63 else _unread(node)
    return _unread(node)
