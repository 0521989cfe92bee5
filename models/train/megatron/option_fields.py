"""The fields of Megatron-core's configuration dataclasses, read from the installed source.

Invariants: nothing of Megatron is imported, for that takes seconds, and without a GPU must not happen before the shim
is in place; a type that cannot be written as text (a function, a context manager) is no alternative of a field.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, reduce
from itertools import chain
from operator import or_
from pathlib import Path
from types import GenericAlias
from typing import Any, Final, Literal, NamedTuple

from models.errors import TrainConfigInvalid

Group = Literal["transformer", "optimizer", "ddp"]

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
DTYPES: Final[Mapping[str, str]] = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp8": "uint8",  # how Megatron-core stores optimizer moments in eight bits
}
DTYPE: Final = "torch.dtype"
_ENUMS: Final = "transformer/enums.py"


class Kind(NamedTuple):
    """One alternative of a type."""

    type: Any  # of a value, as msgspec converts to it
    rule: str  # what a value must be
    example: str = "text"
    stands_for: str = ""  # what a name stands for: `DTYPE`, or one of Megatron's enums


NONE: Final = Kind(None, "none")
_SCALARS: Final[Mapping[str, Kind]] = {
    "bool": Kind(bool, "true or false", "true"),
    "int": Kind(int, "a whole number", "1"),
    "float": Kind(float, "a number", "1"),
    "str": Kind(str, "text"),
}


def known_fields() -> dict[str, tuple[Group, ...]]:
    """Field -> the dataclasses that have it. Raises `TrainConfigInvalid` without megatron-core."""
    found: dict[str, tuple[Group, ...]] = {}
    for group in DATACLASSES:
        for name in fields_of(group):
            found[name] = (*found.get(name, ()), group)
    return found


@cache
def fields_of(group: Group) -> Mapping[str, tuple[Kind, ...]]:
    """Fields of one dataclass with its bases, each with the alternatives of its type.

    Raises `TrainConfigInvalid` without megatron-core.
    """
    found: dict[str, tuple[Kind, ...]] = {}
    for file, name in DATACLASSES[group]:
        for statement in _class(file, name).body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=field), annotation=annotation, value=value):
                    # Text takes any text: it comes after the more exact types.
                    kinds = sorted(_kinds(annotation), key=lambda kind: {str: 1, None: 2}.get(kind.type, 0))
                    if isinstance(value, ast.Constant) and value.value is None and NONE not in kinds:
                        kinds.append(NONE)  # `x: int = None`
                    if not field.startswith("_"):
                        found[field] = tuple(kinds)
    return found


def _kinds(node: ast.expr) -> Iterator[Kind]:
    """The alternatives of an annotation."""
    match node:
        case ast.Constant(value=None):
            yield NONE
        case ast.Constant(value=str() as text):
            yield from _kinds(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from (*_kinds(left), *_kinds(right))
        case ast.Name(id="list"):
            yield _list_of([_SCALARS["int"], _SCALARS["str"]])
        case ast.Name(id=name) if name in _SCALARS:
            yield _SCALARS[name]
        case ast.Name(id=name) if name in _enums():
            yield _choice(_enums()[name], stands_for=name)
        case ast.Attribute(value=ast.Name(id="torch"), attr="dtype"):
            yield Kind(_choice(DTYPES).type, "fp32, bf16, fp16 or fp8", "bf16", DTYPE)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            yield from _kinds(inner)
            yield NONE
        case ast.Subscript(value=ast.Name(id=name), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            match name:
                case "Union":
                    yield from chain.from_iterable(map(_kinds, parts))
                case "Literal":
                    yield _choice([str(part.value) for part in parts if isinstance(part, ast.Constant)])
                case "List" | "list" | "Tuple" | "tuple":
                    yield _list_of(list(dict.fromkeys(chain.from_iterable(map(_kinds, parts)))))


def _choice(names: Sequence[str] | Mapping[str, str], stands_for: str = "") -> Kind:
    first, *_ = names
    return Kind(Literal[tuple(names)], " or ".join(names), first, stands_for)


def _list_of(items: Sequence[Kind]) -> Kind:
    rule = f"a list of {' or '.join(item.rule for item in items)}"
    return Kind(GenericAlias(list, (reduce(or_, [item.type for item in items]),)), rule)


@cache
def _enums() -> Mapping[str, tuple[str, ...]]:
    """Megatron's enums, e.g. AttnBackend, with their members."""
    return {
        node.name: tuple(
            target.id
            for statement in node.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        )
        for node in _module(_ENUMS).body
        if isinstance(node, ast.ClassDef)
    }


def _class(file: str, name: str) -> ast.ClassDef:
    for node in _module(file).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise _not_there(f"{name} in {file}")


@cache
def _module(file: str) -> ast.Module:
    path = _package() / file
    if not path.is_file():
        raise _not_there(file)
    return ast.parse(path.read_text(encoding="utf-8"), filename=file)


def _not_there(what: str) -> TrainConfigInvalid:
    return TrainConfigInvalid(
        f"the installed megatron-core has no {what}, so that --megatron-<option> cannot be checked; install "
        "megatron-core 0.16, or leave these options out"
    )


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
