"""Every leaf of the schema as a command-line flag: its name, its type, its bounds, and how a value is read.

Invariants: the table is made from the schema alone, so a field added there is a flag at once; a flag name is unique
over all sections; a value from text and the same value from TOML go through the same bounds. Nothing heavy is imported.
"""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from configs.schema import Config, EnvironmentConfig, StageConfig
from configs.schema.notation import ReadBy, Section, closest_by_words

N = TypeVar("N", Meta, ReadBy)
Kind = Literal["bool", "scalar", "list", "map", "json", "tables"]

SECTIONS: Final = Config.__struct_fields__

# Sections that are lists of tables: what one table is, and which keys it must have.
TABLES: Final[Mapping[str, tuple[type[Struct], str]]] = {
    "stage": (StageConfig, "name, path and one of after or loop"),
    "environment": (EnvironmentConfig, "name, and path"),
}
# `section.key=value`, `stage=...`: settings by their place.
OVERRIDE: Final = re.compile(rf"(?:(?:{'|'.join(SECTIONS)})\.[\w.\-]+|{'|'.join(TABLES)})=", re.ASCII)


class RefusedValue(Exception):
    """A value that its flag does not take. The text is the rule: 'must be a number >= 0'."""


class Flag(Struct, frozen=True, kw_only=True):
    """One leaf of the schema. `key` is its dotted place, `name` the flag without dashes in front."""

    key: str
    owner: type[Section]  # the struct that has the field
    name: str | None  # None: only as a dotted override
    type: Any
    kind: Kind
    optional: bool
    default: Any
    choices: tuple[str, ...] = ()
    rule: str = ""
    read_by: tuple[str, ...] = ()  # conditions of `configs.schema.notation.ReadBy`: of the section, and of the field

    @property
    def label(self) -> str:
        """How a user writes it: `--train-batch`, or the dotted key."""
        return f"--{self.name}" if self.name else self.key

    @property
    def negatable(self) -> bool:
        return self.kind == "bool" and self.name is not None

    @property
    def several(self) -> bool:
        """Whether it takes more than one value."""
        return self.kind in ("list", "map")

    def from_text(self, text: str) -> Any:
        """Read one value as typed on the command line. Raises `RefusedValue`."""
        if self.optional and text == "none" and "none" not in self.choices:
            return None
        if self.kind == "bool":
            if text not in ("true", "false"):
                raise RefusedValue(self.rule)
            return text == "true"
        if self.kind in ("json", "tables") or (self.kind == "list" and text.startswith("[")):
            try:
                value = msgspec.json.decode(text)
            except msgspec.DecodeError as error:
                raise RefusedValue(f"{self.rule}, and this is not JSON ({error})") from error
            return self.from_value(value)
        if self.kind == "map":
            name, equals, number = text.partition("=")
            return self._convert({name: number} if name and equals else text, strict=False)
        return self._convert((text,) if self.kind == "list" else text, strict=False)

    def from_value(self, value: Any) -> Any:
        """Read a typed value, e.g. of a TOML file. Raises `RefusedValue`."""
        if self.kind == "tables":
            return read_tables(value, self.key)
        if self.kind == "json" and holds_null(value):
            raise RefusedValue(f"{self.rule} without null")
        return self._convert(value, strict=True)

    def from_texts(self, texts: Iterable[str]) -> Any:
        """Read the values of a flag that takes several."""
        if self.kind == "map":
            return {name: number for text in texts for name, number in self.from_text(text).items()}
        return self._convert(tuple(texts), strict=False)

    def example(self) -> str:
        """A value that is certainly accepted, for the cure in an error message."""
        if self.choices and self.default in (None, *self.choices):
            return self.choices[0]
        if self.default not in (None, (), {}) or isinstance(self.default, int | float):
            return show(self.default)
        if self.kind == "map":
            return "reward=2"
        bounds = _bounds(self.type)
        if bounds.ge is not None:
            return show(bounds.ge)
        return show(bounds.gt + 1) if bounds.gt is not None else "text"

    def _convert(self, value: Any, *, strict: bool) -> Any:
        try:
            converted = msgspec.convert(value, type=self.type, strict=strict)
        except (msgspec.ValidationError, OverflowError) as error:
            raise RefusedValue(self.rule) from error
        if isinstance(converted, float) and not math.isfinite(converted):
            raise RefusedValue(f"{self.rule}, and finite")
        # Of all texts that are settings by themselves, paths alone begin so.
        home = isinstance(converted, str) and converted.startswith("~/")
        return os.path.expanduser(converted) if home else converted


def show(value: object) -> str:
    """A value as a user would type it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return " ".join(show(item) for item in value)
    if isinstance(value, dict):
        return msgspec.json.encode(value).decode()
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_tables(value: Any, section: str) -> tuple[Any, ...]:
    """Custom stages or environments from TOML or JSON tables. Raises `RefusedValue` with the rule that is broken."""
    kind, needed = TABLES[section]
    if not isinstance(value, list | tuple):
        raise RefusedValue(f"must be a list of tables, each with {needed}")
    known = kind.__struct_fields__
    tables = []
    for table in value:
        if isinstance(table, dict) and holds_null(table.get("options", {})):
            raise RefusedValue("must be tables whose options hold no null, for recipes are TOML, which has none")
        unknown = [key for key in table if key not in known] if isinstance(table, dict) else []
        if unknown:
            raise RefusedValue(f"must be tables with the keys {', '.join(known)}; {suggestion(unknown[0], known)}")
        try:
            tables.append(msgspec.convert(table, type=kind, strict=True))
        except msgspec.ValidationError as error:
            raise RefusedValue(f"must be tables with {needed} ({error})") from error
    return tuple(tables)


def suggestion(word: str, known: Iterable[str], prefix: str = "") -> str:
    """'did you mean --x?' for the nearest known name, else where to look."""
    near = closest_by_words(word, known)
    return f"did you mean {prefix}{near}?" if near else f"{prefix}{word} resembles no known name; see --help"


@cache
def flags() -> tuple[Flag, ...]:
    """All leaves in the order of the schema."""
    found: list[Flag] = []
    for section in msgspec.structs.fields(Config):
        if section.name in TABLES:
            found.append(_leaf(Config, section, section.name, None))
        else:
            found.extend(_section(section.type, section.name, nested=False))
    return tuple(found)


@cache
def flags_by_key() -> Mapping[str, Flag]:
    return {flag.key: flag for flag in flags()}


def _section(struct: type[Section], prefix: str, *, nested: bool) -> Iterable[Flag]:
    for field in msgspec.structs.fields(struct):
        key = f"{prefix}.{field.name}"
        if _is_struct(field.type):
            yield from _section(field.type, key, nested=True)
        else:
            yield _leaf(struct, field, key, None if nested else field.name.replace("_", "-"))


def _leaf(owner: type[Section], field: msgspec.structs.FieldInfo, key: str, name: str | None) -> Flag:
    members = _members(field.type)
    optional = type(None) in members
    choices = tuple(choice for member in members if get_origin(member) is Literal for choice in get_args(member))
    kind = _kind(members)
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return Flag(
        key=key,
        owner=owner,
        name=name,
        type=field.type,
        kind=kind,
        optional=optional,
        default=default,
        choices=choices,
        rule=_rule(kind, members, _bounds(field.type), choices, optional),
        read_by=tuple(filter(None, (owner.READ_BY, *(note.condition for note in _notes(field.type, ReadBy))))),
    )


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a union, without their annotations."""
    bare = _bare(kind)
    return tuple(map(_bare, get_args(bare))) if get_origin(bare) in (Union, UnionType) else (bare,)


def _bounds(kind: Any) -> Meta:
    """Where the bounds stand: at the number itself, which in `int | None` is inside the union."""
    bare = _bare(kind)
    return next(_notes(get_args(bare)[0] if get_origin(bare) in (Union, UnionType) else kind, Meta), Meta())


def _notes(kind: Any, of: type[N]) -> Iterator[N]:
    return (note for note in get_args(kind)[1:] if isinstance(note, of)) if get_origin(kind) is Annotated else iter(())


def _kind(members: tuple[Any, ...]) -> Kind:
    first = next(member for member in members if member is not type(None))
    if first is bool:
        return "bool"
    if get_origin(first) is dict:
        return "map" if get_args(first)[1] is int else "json"
    if get_origin(first) is tuple:
        return "tables" if _is_struct(get_args(first)[0]) else "list"
    return "scalar"


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _rule(kind: Kind, members: tuple[Any, ...], meta: Meta, choices: tuple[str, ...], optional: bool) -> str:
    words = {
        "bool": "true or false",
        "map": "name=whole number pairs",
        "json": "a JSON object",
        "tables": "a list of tables",
    }
    if kind in words:
        text = words[kind]
    elif kind == "list":
        of = get_args(members[0])[0]
        text = f"a list of {'whole numbers' if of is int else 'texts' if of is str else 'numbers > 0'}"
    elif choices and int not in members:
        text = f"one of {', '.join(choices)}"
    else:
        text = "a whole number" if int in members else "a number" if float in members else "text"
        signs = ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt))
        bounds = [f"{sign} {show(bound)}" for sign, bound in signs if bound is not None]
        text = " or ".join([" ".join([text, " and ".join(bounds)]).strip(), *choices])
    return f"must be {text}" + (" or none" if optional and "none" not in choices else "")


def holds_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(holds_null(item) for item in value.values())
    if isinstance(value, list):
        return any(holds_null(item) for item in value)
    return value is None
