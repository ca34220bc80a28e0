"""The house style as a gate at zero: every source file against rules that a reader would otherwise have to check.

The rules are functions from a parsed file to the places that break it. Each is run over the whole tree, and each
is shown to catch a snippet that breaks it. Import direction and the like are in tests/test_architecture.py,
what no file of any kind may hold in tests/test_text.py.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE_DIRS = ("algorithms", "rollout", "trainer")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 8
MAX_NESTING = 4

ALLOWED: dict[tuple[str, str, str], str] = {
    **{
        ("trainer/text/plain.py", "printing", f"sys.{stream}.write(printable(text))"): "takes control characters out"
        for stream in ("stdout", "stderr")
    },
    (
        "trainer/policy/checkpoint_reader.py",
        "unsafe",
        "import pickle",
    ): "for the unpickler that admits an index and no code",
    ("rollout/sglang/weight_update.py", "unsafe", "import pickle"): "SGLang's update route takes pickled tensors only",
    (
        "rollout/sglang/weight_update.py",
        "unsafe",
        "return base64.b64encode(pickle.dumps(tensors)).decode()",
    ): "writes what SGLang reads; nothing is ever unpickled here",
}
"""(file, rule, text of the line) -> why this one line may break the rule. An entry that excuses nothing fails."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Found = tuple[int, str]
"""A line and what is wrong with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One parsed Python file."""

    path: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def line(self, number: int) -> str:
        """Line `number`, from 1, without the space around it; "" in an empty file."""
        return self.lines[number - 1].strip() if self.lines else ""

    def functions(self) -> Iterator[Function]:
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                yield node

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        """Every call with the dotted name of what is called; parts that are not names read "?"."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield dotted(node.func), node


def parse(text: str, path: str = "snippet.py") -> Source:
    return Source(path=path, text=text, tree=ast.parse(text))


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain; a part that is neither a name nor an attribute reads "?"."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def is_config(node: ast.expr) -> bool:
    """Whether the expression is named like a config of ours; `hf_config` belongs to transformers."""
    last = dotted(node).rpartition(".")[2].lstrip("_")
    return last != "hf_config" and re.fullmatch(r"(\w+_)?(cfg|config|conf)", last) is not None


def module_docstring(source: Source) -> Iterator[Found]:
    if not ast.get_docstring(source.tree):
        yield 1, "the file has no docstring"


def file_length(source: Source) -> Iterator[Found]:
    if len(source.lines) > MAX_FILE_LINES:
        yield MAX_FILE_LINES + 1, f"{len(source.lines)} lines, at most {MAX_FILE_LINES}: two files?"


def function_length(source: Source) -> Iterator[Found]:
    for function in source.functions():
        num_lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if num_lines > MAX_FUNCTION_LINES:
            yield function.lineno, f"{function.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}"


def parameters(source: Source) -> Iterator[Found]:
    for function in source.functions():
        names = [argument.arg for argument in all_arguments(function)]
        if names[:1] in (["self"], ["cls"]):
            names = names[1:]
        if len(names) > MAX_PARAMETERS:
            yield function.lineno, f"{function.name} has {len(names)} parameters, at most {MAX_PARAMETERS}"


def all_arguments(function: Function) -> list[ast.arg]:
    a = function.args
    named = [*a.posonlyargs, *a.args, *a.kwonlyargs]
    return named + [star for star in (a.vararg, a.kwarg) if star is not None]


def annotations(source: Source) -> Iterator[Found]:
    for function in source.functions():
        bare = [a.arg for a in all_arguments(function) if a.annotation is None and a.arg not in ("self", "cls")]
        if bare:
            yield function.lineno, f"{function.name} does not annotate {', '.join(bare)}"
        if function.returns is None:
            yield function.lineno, f"{function.name} does not annotate what it returns"


def nesting(source: Source) -> Iterator[Found]:
    for function in source.functions():
        deepest, line = max(block_depths(function.body, 0), default=(0, 0))
        if deepest > MAX_NESTING:
            yield line, f"{function.name} nests {deepest} blocks, at most {MAX_NESTING}"


def block_depths(body: list[ast.stmt], depth: int) -> Iterator[tuple[int, int]]:
    """(depth, line) of every block below `body`. An elif is as deep as its if; a nested function counts for itself."""
    for statement in body:
        if isinstance(statement, Function | ast.ClassDef):
            continue
        for block in blocks_of(statement):
            elif_ = isinstance(statement, ast.If) and block is statement.orelse and is_elif(block)
            inner = depth if elif_ else depth + 1
            yield inner, block[0].lineno
            yield from block_depths(block, inner)


def is_elif(block: list[ast.stmt]) -> bool:
    return len(block) == 1 and isinstance(block[0], ast.If)


def blocks_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for value in (child for _, child in ast.iter_fields(statement) if isinstance(child, list)):
        if value and isinstance(value[0], ast.stmt):
            yield value
        for part in value:
            if isinstance(part, ast.ExceptHandler | ast.match_case):
                yield part.body


def printing(source: Source) -> Iterator[Found]:
    for name, call in source.calls():
        if name == "print":
            yield call.lineno, "print(): log it, or use to_stdout of trainer/text/plain.py in the command line"
        if name in ("sys.stdout.write", "sys.stderr.write"):
            yield call.lineno, f"{name}() lets control characters through: use trainer/text/plain.py"


def swallowed_error(source: Source) -> Iterator[Found]:
    broad = {"Exception", "BaseException"}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and all(is_empty(statement) for statement in node.body):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or dotted(kind) in broad for kind in caught):
                yield node.lineno, "every error is caught and dropped"
    for name, call in source.calls():
        if name.rpartition(".")[2] == "suppress" and any(dotted(kind) in broad for kind in call.args):
            yield call.lineno, "every error is suppressed"


def is_empty(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant or isinstance(statement, ast.Pass | ast.Continue)


def config_default(source: Source) -> Iterator[Found]:
    for name, call in source.calls():
        if name == "getattr" and len(call.args) == 3 and is_config(call.args[0]):
            yield call.lineno, "getattr(config, key, default): defaults stand on the dataclass fields"
        if isinstance(call.func, ast.Attribute) and call.func.attr == "get" and is_config(call.func.value):
            yield call.lineno, "config.get(key, default): defaults stand on the dataclass fields"


def bare_zip(source: Source) -> Iterator[Found]:
    for name, call in source.calls():
        if name == "zip" and not any(keyword.arg == "strict" for keyword in call.keywords):
            yield call.lineno, "zip() without strict="


def mutable_global(source: Source) -> Iterator[Found]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


UNSAFE_NAMES = {"eval", "exec", "os.system", "os.popen", "torch.hub.load", "yaml.load", "yaml.unsafe_load"}
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_KEYWORDS = {("weights_only", False), ("trust_remote_code", True), ("shell", True), ("allow_pickle", True)}


def unsafe(source: Source) -> Iterator[Found]:
    for name, call in source.calls():
        if name in UNSAFE_NAMES:
            yield call.lineno, f"{name}()"
        if re.search(r"(^|\.)\w*(pickle|Pickler)\.(load|loads|dump|dumps)$", name):
            yield call.lineno, f"{name}()"
        if name == "torch.load" and not any(keyword.arg == "weights_only" for keyword in call.keywords):
            yield call.lineno, "torch.load() without weights_only=True"
        for keyword in call.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if (keyword.arg, value) in UNSAFE_KEYWORDS:
                yield call.lineno, f"{keyword.arg}={value}"
    for node in ast.walk(source.tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            if module.partition(".")[0] in UNSAFE_MODULES:
                yield node.lineno, f"import of {module}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "0.0.0.0" in node.value:
            yield node.lineno, "listens on every interface"


def todo(source: Source) -> Iterator[Found]:
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    comments = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    marked = [(number, comment) for number, comment in comments if re.search(r"\bTODO\b", comment)]
    for number, comment in marked:
        if not re.search(r"TODO(\([^)]+\))?: \w+( \S+){3,}", comment):
            yield number, "a TODO gives its reason: TODO: what is missing and why"
    for number, _ in marked[1:]:
        yield number, "more than one TODO in a file"


Rule = Callable[[Source], Iterator[Found]]

RULES: tuple[Rule, ...] = (
    module_docstring,
    file_length,
    function_length,
    parameters,
    annotations,
    nesting,
    printing,
    swallowed_error,
    config_default,
    bare_zip,
    mutable_global,
    unsafe,
    todo,
)
TEST_RULES: tuple[Rule, ...] = (module_docstring, swallowed_error, todo)
"""The rules that hold for tests too: a test may be long, and may plant what the rules forbid."""

BROKEN: dict[Rule, tuple[str, ...]] = {
    module_docstring: ("x = 1",),
    file_length: ("\n" * (MAX_FILE_LINES + 1),),
    function_length: ("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES,),
    parameters: (
        "def f(a, b, c, d, e, f, g, h, i): ...",
        "class A:\n def f(self, a, b, c, d, *, e, f, g, h, **i): ...",
    ),
    annotations: ("def f(a) -> None: ...", "def f(a: int): ...", "def f(*a) -> None: ..."),
    nesting: (
        "def f():\n if a:\n  for b in c:\n   while d:\n    with e:\n     try:\n      g()\n     finally:\n      h()",
        "def f():\n if a: pass\n elif b:\n  for c in d:\n   match e:\n    case 1:\n     if f:\n      if g: pass",
    ),
    printing: ("print('x')", "sys.stderr.write(text)"),
    swallowed_error: (
        "try: f()\nexcept: pass",
        "try: f()\nexcept Exception: pass",
        "try: f()\nexcept (OSError, Exception): ...",
        "for i in j:\n try: f()\n except BaseException: continue",
        "with contextlib.suppress(Exception): f()",
    ),
    config_default: (
        "cfg.get('lr', 1)",
        "self._config.get('lr')",
        "getattr(config, 'lr', 1)",
        "getattr(self.optim_config, 'lr', None)",
    ),
    bare_zip: ("zip(a, b)",),
    mutable_global: ("def f():\n global x\n x = 1",),
    unsafe: (
        "eval(x)",
        "exec(x)",
        "pickle.load(f)",
        "ForkingPickler.loads(b)",
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "subprocess.run(c, shell=True)",
        "numpy.load(p, allow_pickle=True)",
        "serve(host='0.0.0.0')",
    ),
    todo: ("# TODO", "# TODO: fix", "# TODO: the reason is given here\n# TODO: a second one is too many"),
}
"""Snippets that break each rule: what shows that the gate is awake."""


@functools.cache
def sources(*directories: str) -> tuple[Source, ...]:
    found = []
    for directory in directories:
        for path in sorted((ROOT / directory).rglob("*.py")):
            found.append(parse(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()))
    return tuple(found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps(rule: Rule) -> None:
    checked = sources(*SOURCE_DIRS) + (sources("tests") if rule in TEST_RULES else ())
    assert len(checked) > 10, "the sources were not found"
    excused = {(path, text) for path, name, text in ALLOWED if name == rule.__name__}
    broken = []
    for source in checked:
        for line, problem in rule(source):
            text = source.lines[line - 1].strip() if source.lines else ""
            if (source.path, text) not in excused:
                broken.append(f"{source.path}:{line}: {problem}")
    assert not broken, "\n".join(["", *broken])


def test_every_exception_is_needed() -> None:
    used = set()
    for source in sources(*SOURCE_DIRS):
        for rule in RULES:
            used |= {(source.path, rule.__name__, source.line(line)) for line, _ in rule(source)}
    assert ALLOWED.keys() <= used, f"excuses nothing: {ALLOWED.keys() - used}"


@pytest.mark.parametrize(
    ("rule", "snippet"),
    [(rule, snippet) for rule in RULES for snippet in BROKEN[rule]],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_rule_catches(rule: Rule, snippet: str) -> None:
    assert list(rule(parse(snippet)))


KEPT = '''\
"""A file that keeps every rule, close to the edge of several."""


class A:
    def f(self, a: int, b: int, c: int, d: int, *, e: int, f: int, g: int, h: int) -> None:
        try:
            if a:
                for _ in range(b):
                    with open(c):
                        self.x = 1
            elif d:
                pass
        except OSError:
            pass


def pairs(a: list[int], hf_config: object) -> object:
    # TODO: take the size from the tokenizer once it is known
    torch.load(a, weights_only=True)
    return zip(a, a, strict=True), getattr(hf_config, "head_dim", None), os.environ.get("HOME", "")
'''


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_lets_good_code_pass(rule: Rule) -> None:
    assert not list(rule(parse(KEPT)))
