"""The command line, read against the schema: flags, `--no-` flags, and dotted overrides.

Grammar: `--flag value`, `--flag=value`, `--flag a b c` (lists), `--flag` and `--no-flag` (booleans),
`section.key=value`, `--section.key value`, `stage.<name>.<field>=value`, the same with
`environment`. A name must be written in full.
`--sglang-<option>` and `--router-<option>` that are no flags of ours are passed on, see `configs.passthrough`; options
of slime and Megatron-LM are translated first, see `configs.translate`.
Invariant: all faults of a command line are listed at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import Struct

from configs.flags import OVERRIDE, TABLES, Flag, RefusedValue, flags, flags_by_key, suggestion
from configs.layers import ConfigError, Layer, TableEdit, refusal
from configs.passthrough import option_of, option_value, retired
from configs.schema.notation import closest_by_words
from configs.translate import translate

# Flags of the command itself; the schema may not use these names.
RESERVED: Final = {
    "config": "recipes: TOML files, or names of built-in ones; a later recipe outranks the earlier ones",
    "dry-run": "print the plan (stages, placement, batch arithmetic, staleness, memory) and stop",
    "json": "print errors, and the plan of --dry-run, as JSON; every command has this flag, see docs/control.md",
    "help": "print this text",
    "version": "print the version",
}


class Arguments(Struct, frozen=True, kw_only=True):
    """A parsed command line."""

    layer: Layer
    config: tuple[str, ...] = ()
    dry_run: bool = False
    json: bool = False
    help: bool = False
    version: bool = False
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what is understood otherwise than it was written
    unread: frozenset[str] = frozenset()  # flags whose value cannot be read

    def judged(self, faults: Iterable[str]) -> tuple[str, ...]:
        """The faults of later checks that do not depend on a flag whose value could not be read."""
        unread = [re.compile(rf"--{re.escape(name)}(?![\w-])") for name in self.unread]
        return tuple(fault for fault in faults if not any(name.search(fault) for name in unread))


def parse(argv: Sequence[str]) -> Arguments:
    """Read a command line (without the program's name). Raises `ConfigError` that lists every fault."""
    arguments = read(argv)
    if arguments.faults and not (arguments.help or arguments.version):
        raise ConfigError(arguments.faults)
    return arguments


def read(argv: Sequence[str]) -> Arguments:
    """As `parse`, with the faults beside what could be read, so that other checks may add theirs."""
    translated = translate(argv)
    reader = _Reader(list(translated.argv))
    reader.faults += translated.faults
    while reader.rest:
        reader.read_one()
    return Arguments(
        layer=Layer(origin="command line", values=reader.values, labels=reader.labels, edits=tuple(reader.edits)),
        config=tuple(reader.config),
        dry_run="dry-run" in reader.switches,
        json="json" in reader.switches,
        help="help" in reader.switches,
        version="version" in reader.switches,
        faults=tuple(reader.faults),
        notes=translated.notes,
        unread=frozenset(reader.unread),
    )


@cache
def _by_name() -> dict[str, Flag]:
    return {flag.name: flag for flag in flags() if flag.name is not None}


def _all_names() -> Iterable[str]:
    yield from RESERVED
    for flag in flags():
        if flag.name is not None:
            yield flag.name
            if flag.negatable:
                yield f"no-{flag.name}"


class _Reader:
    """Consumes the tokens from the left."""

    def __init__(self, tokens: list[str]) -> None:
        self.rest = tokens
        self.values: dict[str, Any] = {}
        self.labels: dict[str, str] = {}
        self.edits: list[TableEdit] = []
        self.faults: list[str] = []
        self.unread: set[str] = set()
        self.switches: set[str] = set()
        self.config: list[str] = []

    def read_one(self) -> None:
        token = self.rest.pop(0)
        if token == "-h":
            token = "--help"
        if not token.startswith("--") and not OVERRIDE.match(token):
            self.faults.append(_stray(token))
            return
        name, equals, attached = token.removeprefix("--").partition("=")
        inline = attached if equals else None
        if "." in name or name in flags_by_key():
            self._dotted(name if name.partition(".")[0] in TABLES else name.replace("-", "_"), inline)
        elif name in RESERVED:
            self._reserved(name, inline)
        elif name in _by_name():
            self._flag(_by_name()[name], f"--{name}", inline)
        elif name.startswith("no-") and (flag := _by_name().get(name[3:])) and flag.negatable:
            if inline is not None:
                self.faults.append(f"--{name} takes no value, but got {inline!r}; write --{name} alone")
            self._set(flag, False, f"--{name}")
        elif (fault := retired(name)) is not None:
            self.faults.append(f"--{fault}")
            self._values(several=True)
        elif (passed := option_of(name, _all_names())) is not None:
            self._pass_on(*passed, name, inline)
        else:
            self._unknown(name)

    def _reserved(self, name: str, inline: str | None) -> None:
        if name == "config":
            names = [inline] if inline is not None else self._values(several=True)
            if not any(names):
                self.faults.append(
                    "--config needs a value: a TOML file or the name of a recipe; see docs/configuration.md"
                )
            self.config.extend(names)
        elif inline is not None:
            self.faults.append(f"--{name} takes no value, but got {inline!r}; write --{name} alone")
        else:
            self.switches.add(name)

    def _dotted(self, key: str, inline: str | None) -> None:
        flag = flags_by_key().get(key)
        if flag is not None:
            self._flag(flag, key, inline, dotted=True)
            return
        if key.partition(".")[0] in TABLES:
            self._table(key, inline if inline is not None else self._next())
            return
        parent, _, inner = key.rpartition(".")
        owner = flags_by_key().get(parent)
        if owner is not None and owner.kind in ("map", "json"):
            self._entry(owner, inner, key, inline if inline is not None else self._next())
            return
        name = key.rpartition(".")[2].replace("_", "-")
        if (fault := retired(key)) is not None:
            self.faults.append(fault)
        elif name in _by_name():
            right = _by_name()[name].key
            self.faults.append(f"{key} is no key, but {right} is; write {right} or --{name}")
        else:
            self.faults.append(f"{key} is no key of the configuration; {suggestion(key, flags_by_key())}")
        if inline is None:
            self._values(several=True)  # each value would add a fault of its own

    def _flag(self, flag: Flag, label: str, inline: str | None, *, dotted: bool = False) -> None:
        if flag.kind == "bool" and inline is None:
            follows = bool(self.rest) and self.rest[0] in ("true", "false", *(("none",) if flag.optional else ()))
            inline = self.rest.pop(0) if follows else "true"
        texts = [inline] if inline is not None else self._values(several=flag.several)
        if not texts:
            self._refused(flag, f"{label} has no value, but {flag.rule}; give for example {label} {flag.example()}")
            return
        try:
            several = flag.several and not (dotted and len(texts) == 1 and flag.kind == "list")
            value = flag.from_texts(texts) if several else flag.from_text(texts[0])
        except RefusedValue as error:
            shown = " ".join(texts)
            self._refused(flag, refusal(flag, label, shown if flag.kind != "bool" else texts[0], str(error)))
            return
        self._set(flag, value, label)

    def _entry(self, owner: Flag, inner: str, label: str, text: str | None) -> None:
        """`run.scale.reward=4`: one entry of an object."""
        if text is None:
            self._refused(owner, f"{label} has no value, but needs one; write {label}=value")
            return
        try:
            if owner.kind == "map":
                value = owner.from_text(f"{inner}={text}")
            else:
                value = owner.from_value({inner: _json_or_text(text)})
        except RefusedValue as error:
            self._refused(owner, refusal(owner, label, text, str(error)))
            return
        self._set(owner, value, label)

    def _pass_on(self, key: str, option: str, fault: str | None, name: str, inline: str | None) -> None:
        """An option of the SGLang server or its router: none, one or several values as they stand."""
        texts = [inline] if inline is not None else self._values(several=True)
        if fault is not None:
            self.faults.append(fault)
            return
        owner = flags_by_key()[key]
        before = self.values.get(key, {}).get(option)
        self._set(owner, {option: option_value(key, option, texts, before)}, f"--{name}")

    def _table(self, key: str, text: str | None) -> None:
        section = key.partition(".")[0]
        known = TABLES[section][0].__struct_fields__
        match key.split("."):
            case [_, name, field] if field in known and text is not None:
                self.edits.append(TableEdit(section, name, field, text))
            case [_, name, field] if text is not None:
                hint = suggestion(field, known, prefix=f"{section}.{name}.")
                word = "a custom stage" if section == "stage" else "an environment"
                self.faults.append(f"{key} is no key of {word}; {hint}")
            case _:
                self.faults.append(
                    f"{key} is incomplete; write {section}.<name>.<field>=value, or {section}='[...]' with JSON"
                )

    def _refused(self, flag: Flag, fault: str) -> None:
        self.faults.append(fault)
        if flag.name is not None:
            self.unread.add(flag.name)

    def _unknown(self, name: str) -> None:
        meant = closest_by_words(name.replace("_", "-"), _all_names())
        if meant is not None:
            self.unread.add(meant)
        self.faults.append(f"--{name} is no flag; {suggestion(name.replace('_', '-'), _all_names(), prefix='--')}")
        self._values(several=True)  # its values would only make more noise

    def _set(self, flag: Flag, value: Any, label: str) -> None:
        """Repeated lists are joined, repeated objects merged, and of repeated scalars the last one counts."""
        old = self.values.get(flag.key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = {**old, **value}
        elif flag.kind == "list" and old and value:
            value = (*old, *value)
        self.values[flag.key] = value
        self.labels[flag.key] = label

    def _next(self) -> str | None:
        values = self._values(several=False)
        return values[0] if values else None

    def _values(self, *, several: bool) -> list[str]:
        """The values up to the next flag or override."""
        values: list[str] = []
        while self.rest and not self.rest[0].startswith("--") and not OVERRIDE.match(self.rest[0]):
            values.append(self.rest.pop(0))
            if not several:
                break
        return values


def _stray(token: str) -> str:
    if token.startswith("-"):
        near = suggestion(token.strip("-"), _all_names(), "--")
        return f"{token} is no flag, for flags begin with two dashes; {near}"
    key, equals, _ = token.partition("=")
    if equals and "." in key:
        return f"{key} is no key of the configuration; {suggestion(key, flags_by_key())}"
    return f"{token!r} follows no flag that takes it; write --flag value or section.key=value"


def _json_or_text(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
