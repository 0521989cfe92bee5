"""The fields of Megatron-core's configuration dataclasses, read from the installed source.

Invariants: nothing of Megatron is imported, for that takes seconds, and without a GPU must not happen before the shim
is in place; a type that cannot be written as text (a function, a context manager) is `opaque`.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final, Literal, NamedTuple

from models.train.errors import TrainConfigInvalid

Group = Literal["transformer", "optimizer", "ddp"]
Name = Literal["none", "bool", "int", "float", "str", "choice", "dtype", "enum", "list", "opaque"]

# Where the fields of each dataclass stand: (file, class), those of the base class first.
DATACLASSES: Final[Mapping[Group, tuple[tuple[str, str], ...]]] = {
    "transformer": (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
        ("transformer/transformer_config.py", "MLATransformerConfig"),
    ),
    "optimizer": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
    "ddp": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
}
_ENUMS: Final = "transformer/enums.py"
_SCALARS: Final[Mapping[str, Name]] = {"bool": "bool", "int": "int", "float": "float", "str": "str"}


class Kind(NamedTuple):
    """One alternative of a type. `choices`: of a choice; `enum`: its name; `items`: alternatives inside a list."""

    name: Name
    choices: tuple[str, ...] = ()
    enum: str = ""
    items: tuple[Kind, ...] = ()

    def __str__(self) -> str:
        if self.name == "choice":
            return " or ".join(self.choices)
        if self.name == "list":
            return f"a list of {' or '.join(map(str, self.items))}"
        words = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "none": "none"}
        if self.name == "dtype":
            return "fp32, bf16, fp16 or fp8"
        if self.name == "enum":
            return " or ".join(enum_members(self.enum))
        return words.get(self.name, self.name)


class Field(NamedTuple):
    """A field of one dataclass. `kinds`: the alternatives of its type, None included where it may be None."""

    name: str
    kinds: tuple[Kind, ...]


def known_fields() -> dict[str, tuple[Group, ...]]:
    """Field -> the dataclasses that have it. Raises `TrainConfigInvalid` without megatron-core."""
    found: dict[str, tuple[Group, ...]] = {}
    for group in DATACLASSES:
        for name in fields_of(group):
            found[name] = (*found.get(name, ()), group)
    return found


@cache
def fields_of(group: Group) -> Mapping[str, Field]:
    """Fields of one dataclass with its bases. Raises `TrainConfigInvalid` without megatron-core."""
    found: dict[str, Field] = {}
    for file, name in DATACLASSES[group]:
        for statement in _class(file, name).body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=field), annotation=annotation, value=value):
                    kinds = tuple(_kinds(annotation))
                    if isinstance(value, ast.Constant) and value.value is None and Kind("none") not in kinds:
                        kinds = (*kinds, Kind("none"))  # `x: int = None`
                    if not field.startswith("_"):
                        found[field] = Field(field, kinds)
    return found


@cache
def enum_members(name: str) -> tuple[str, ...]:
    """Members of one of Megatron's enums, e.g. AttnBackend."""
    body = _class(_ENUMS, name).body
    return tuple(
        target.id
        for statement in body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    )


def _kinds(node: ast.expr) -> Iterator[Kind]:
    """The alternatives of an annotation."""
    match node:
        case ast.Constant(value=None):
            yield Kind("none")
        case ast.Constant(value=str() as text):
            yield from _kinds(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _kinds(left)
            yield from _kinds(right)
        case ast.Name(id=name):
            yield _named(name)
        case ast.Attribute(value=ast.Name(id="torch"), attr="dtype"):
            yield Kind("dtype")
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            yield from _kinds(inner)
            yield Kind("none")
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=parts)):
            for part in parts:
                yield from _kinds(part)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            yield Kind("choice", choices=tuple(str(part.value) for part in parts if isinstance(part, ast.Constant)))
        case ast.Subscript(value=ast.Name(id="List" | "list"), slice=inner):
            yield Kind("list", items=tuple(_kinds(inner)))
        case ast.Subscript(value=ast.Name(id="Tuple" | "tuple"), slice=ast.Tuple(elts=parts)):
            yield Kind("list", items=tuple(dict.fromkeys(kind for part in parts for kind in _kinds(part))))
        case _:
            yield Kind("opaque")


def _named(name: str) -> Kind:
    if name in _SCALARS:
        return Kind(_SCALARS[name])
    if name == "list":
        return Kind("list", items=(Kind("int"), Kind("str")))
    return Kind("enum", enum=name) if name in _enums() else Kind("opaque")


@cache
def _enums() -> frozenset[str]:
    return frozenset(node.name for node in _module(_ENUMS).body if isinstance(node, ast.ClassDef))


def _class(file: str, name: str) -> ast.ClassDef:
    for node in _module(file).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise TrainConfigInvalid(
        f"the installed megatron-core has no {name} in {file}, so that --megatron-<option> cannot be checked; install "
        "megatron-core 0.16, or leave these options out"
    )


@cache
def _module(file: str) -> ast.Module:
    path = _package() / file
    if not path.is_file():
        raise TrainConfigInvalid(
            f"the installed megatron-core has no {file}, so that --megatron-<option> cannot be checked; install "
            "megatron-core 0.16, or leave these options out"
        )
    return ast.parse(path.read_text(encoding="utf-8"), filename=file)


def _package() -> Path:
    """The directory of megatron-core. `megatron` is a namespace package, so that looking runs no code of it."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        raise TrainConfigInvalid(
            "--train-backend is megatron, but megatron-core is not installed in this environment; install it (extra "
            "'megatron' of Sluice), or choose --train-backend fsdp"
        )
    return Path(found.origin).parent
