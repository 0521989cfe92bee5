"""Small changes of the code, known by what they change and not by where it stands.

A mutant is the innermost function or class, its statement as `ast.unparse` writes it (messages and annotations left
out), an operator, and which occurrence of it. The same mutant is found again after a change of comments, of formatting
or of the file. If a name has changed, the statement alone decides, then its form without names.
"""

from __future__ import annotations

import ast
import copy
import difflib
import functools
import itertools
import keyword
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PACKAGES: Final = ("stages", "models/algorithms", "models/train", "pipeline", "transport", "configs")
LEAST: Final = 40  # mutants of a package
NO_PRODUCT: Final = ("tests", "bench", "runs", "build")
SWAPS: Final = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "and": "or", "or": "and"} | {
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
    "+": "-", "-": "+", "*": "//", "//": "*", "/": "*", "%": "*",
}  # fmt: skip
OPERATOR: Final = re.compile(r"is\s+not\b|not\s+in\b|is\b|in\b|and\b|or\b|[<>=!]=|//|[-<>+*/%]")
LOG: Final = re.compile(r"(\w+\.)*(_?log|logger|logging|warnings)\.\w+$|print$|log$")


@dataclass(frozen=True)
class Mutant:
    package: str
    file: str  # where it was when it was sampled: no part of its identity
    qualname: str  # of the innermost function or class; "" at the top of a module
    statement: str
    operator: str
    occurrence: int  # from 0, in the order of the source, among those equal in all else


@dataclass(frozen=True)
class Site:
    """Where a mutant is in a tree. Lines count from 1; `start` and `end` are offsets in bytes."""

    mutant: Mutant
    start: int
    end: int
    new: str
    lines: range  # a test that reaches one of these may see the mutant
    at_import: bool

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


def package_of(file: str) -> str:
    """The package of the measure, or the first folder."""
    return next((package for package in PACKAGES if f"/{package}/" in f"/{file}"), file.split("/")[0])


def product_files(root: Path) -> list[Path]:
    tops = [top for top in sorted(root.iterdir()) if top.name not in NO_PRODUCT and not top.name.startswith(".")]
    return [path for top in tops for path in ([top] if top.suffix == ".py" else sorted(top.rglob("*.py")))]


def normalise(tree: ast.AST) -> None:
    """Take out what may change without a change of behaviour: messages and annotations."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            node.value = "…"
        elif isinstance(node, ast.JoinedStr):
            node.values = []
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Name("_")


def is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and LOG.match(ast.unparse(node.func)) is not None


class Finder:
    """All sites of one file."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.sites: list[Site] = []
        self.scope, self.in_function, self.text, self.first = "", False, "", 0
        tree = ast.parse(source)
        normalise(tree)
        self.code_lines = len({getattr(node, "lineno", 0) for node in ast.walk(tree)})
        self.children(tree)

    def offsets(self, node: Any) -> tuple[int, int]:
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def add(self, operator: str, node: Any, new: str, *, span: Any = None, pad: str = "", body: Any = None) -> None:
        """Note a site. `pad` keeps the count of lines where `new` is shorter than the node."""
        key = (self.scope, self.text, operator)
        mutant = Mutant(package_of(self.file), self.file, *key, self.counts[key])
        self.counts[key] += 1
        start, end = span or self.offsets(node)
        new += pad * (self.source.count(b"\n", start, end) if pad else 0)
        lines = body or range(self.first, node.end_lineno + 1)
        self.sites.append(Site(mutant, start, end, new, lines, body is not None or not self.in_function))

    def between(self, operator: str, node: Any, operands: Sequence[ast.expr]) -> None:
        """Change the operators that stand between operands."""
        for left, right in itertools.pairwise(operands):
            start, end = self.offsets(left)[1], self.offsets(right)[0]
            found = list(OPERATOR.finditer(self.source[start:end].decode()))
            new = SWAPS.get(" ".join(found[0].group().split())) if len(found) == 1 else None
            if new is not None and b"#" not in self.source[start:end]:
                self.add(operator, node, new, span=(start + found[0].start(), start + found[0].end()))

    def children(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self.statement(child)
            elif isinstance(child, ast.expr):
                self.expression(child)
            elif not isinstance(child, ast.arguments | ast.pattern):
                if isinstance(child, ast.match_case):
                    self.text, self.first = f"case {ast.unparse(child.pattern)}", child.pattern.lineno
                self.children(child)

    def statement(self, node: Any) -> None:
        head = copy.copy(node)
        for field in ("body", "orelse", "handlers", "finalbody", "cases", "decorator_list"):
            if hasattr(head, field):
                setattr(head, field, [])
        self.text, self.first = re.sub(r": _( =|$)", r"\1", ast.unparse(head).strip()), node.lineno
        value = getattr(node, "value", None)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.definition(node)
        elif not re.match(r"if (TYPE_CHECKING|__name__)|__all__|'", self.text) and not is_log(value):
            called = isinstance(node, ast.Expr) and isinstance(getattr(value, "value", value), ast.Call)
            assigned = isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and value is not None
            if self.in_function and (assigned or called or isinstance(node, ast.Raise)):
                self.add("delete", node, "pass", pad="\n")
            if isinstance(node, ast.Return) and value is not None and ast.unparse(value) != "None":
                self.add("return", node, "return None", pad="\n")
            if isinstance(node, ast.If):
                self.condition(node)
            if not isinstance(node, ast.Raise):
                self.children(node)

    def definition(self, node: Any) -> None:
        outer = self.scope, self.in_function
        if not isinstance(node, ast.ClassDef):
            self.text = f"def {node.name}({ast.unparse(node.args)})"
            for default in (*node.args.defaults, *node.args.kw_defaults):
                self.constant(default, "default", body=range(node.body[0].lineno, node.end_lineno + 1))
        self.scope = f"{self.scope}.{node.name}".strip(".")
        self.in_function = not isinstance(node, ast.ClassDef)
        for statement in node.body:
            self.statement(statement)
        self.scope, self.in_function = outer

    def condition(self, node: Any) -> None:
        for new in ("True", "False"):
            self.add(f"if-{new.lower()}", node.test, f" {new} ", pad="\\\n")

    def constant(self, node: Any, operator: str, *, body: range | None = None) -> None:
        if isinstance(value := getattr(node, "value", None), bool | int | float):
            self.add(operator, node, repr(not value if isinstance(value, bool) else value + 1), body=body)

    def expression(self, node: Any) -> None:
        if is_log(node) or (isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Literal", "Annotated")):
            return
        if isinstance(node, ast.Constant):
            self.constant(node, "constant")
        elif isinstance(node, ast.Compare):
            self.between("compare", node, [node.left, *node.comparators])
        elif isinstance(node, ast.BoolOp):
            self.between("boolean", node, node.values)
        elif isinstance(node, ast.BinOp):
            self.between("arithmetic", node, [node.left, node.right])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start = self.offsets(node)[0]
            self.add("not", node, "", span=(start, start + len("not ")))
        elif isinstance(node, ast.IfExp):
            self.condition(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("min", "max"):
            self.add("min-max", node.func, "max" if ast.unparse(node.func) == "min" else "min")
        self.children(node)


def all_sites(root: Path) -> tuple[list[Site], Counter[str]]:
    """All sites of a tree, and the code lines of each package."""
    finders = [Finder(path.relative_to(root).as_posix(), path.read_bytes()) for path in product_files(root)]
    lines: Counter[str] = Counter()
    for finder in finders:
        lines[package_of(finder.file)] += finder.code_lines
    return [site for finder in finders for site in finder.sites], lines


def sample(root: Path, count: int, seed: int) -> list[Mutant]:
    """Mutants by chance, as many per package as it has code lines, but `LEAST` or more."""
    sites, lines = all_sites(root)
    rng = random.Random(seed)
    spare, total = count - LEAST * len(PACKAGES), sum(lines[package] for package in PACKAGES)
    quotas = {package: LEAST + spare * lines[package] // total for package in PACKAGES}
    quotas[PACKAGES[0]] += count - sum(quotas.values())
    chosen: list[Mutant] = []
    for package in PACKAGES:
        there = [site for site in sites if site.mutant.package == package]
        rng.shuffle(there)
        chosen += itertools.islice((site.mutant for site in there if compiles(root, site)), quotas[package])
    return chosen


def compiles(root: Path, site: Site) -> bool:
    source = (root / site.mutant.file).read_bytes()
    try:
        return ast.dump(ast.parse(site.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


@functools.cache
def form(statement: str) -> str:
    """A statement without its names."""
    return re.sub(r"[^\W\d]\w*", lambda word: word[0] if keyword.iskeyword(word[0]) else "_", statement)


def likeness(mutant: Mutant, site: Site) -> tuple[bool, bool, float]:
    """How likely a site is the mutant, of those that could be."""
    was, now = (f"{m.qualname} {m.statement} {m.file}" for m in (mutant, site.mutant))
    ratio = difflib.SequenceMatcher(None, was, now, autojunk=False).ratio()
    same_file = Path(site.mutant.file).name == Path(mutant.file).name
    return site.mutant.package == mutant.package, same_file, ratio


def last(mutant: Mutant) -> str:
    return mutant.qualname.split(".")[-1]


KEYS: Final[Sequence[tuple[str, Callable[[Mutant], object]]]] = (
    ("exact", lambda m: (m.qualname, m.statement, m.operator, m.occurrence)),
    ("moved", lambda m: (last(m), m.statement, m.operator, m.occurrence)),
    ("moved", lambda m: (m.package, m.statement, m.operator, m.occurrence)),
    ("renamed", lambda m: (last(m), form(m.statement), m.operator, m.occurrence)),
    ("renamed", lambda m: (m.package, form(m.statement), m.operator, m.occurrence, len(form(m.statement)) > 30 or m)),
)


def find_again(mutants: Mapping[str, Mutant], sites: Iterable[Site]) -> Iterator[tuple[str, Site | None, str]]:
    """Each mutant's site by its id, and how it was found: `exact`, `moved`, `renamed` or `gone`."""
    left, free = dict(mutants), {(site.mutant.file, site.start, site.mutant.operator): site for site in sites}
    for how, key in KEYS:
        index: dict[object, list[tuple[str, int, str]]] = defaultdict(list)
        for place, site in free.items():
            index[key(site.mutant)].append(place)
        for name, mutant in list(left.items()):
            places = [place for place in index[key(mutant)] if place in free]
            ranks = {place: likeness(mutant, free[place]) for place in places}
            best = max(places, key=ranks.__getitem__, default=None)
            if best is not None and (how != "renamed" or ranks[best][2] > 0.6):
                yield name, free.pop(best), how
                del left[name]
    yield from ((name, None, "gone") for name in left)
