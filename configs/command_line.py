"""The command line, read against the schema: flags, `--no-` flags, and dotted overrides.

Grammar: `--flag value`, `--flag=value`, `--flag a b c` (lists), `--flag` and `--no-flag` (booleans),
`section.key=value`, `--section.key value`, `stage.<name>.<field>=value`, the same with
`environment`. A name must be written in full.
`--sglang-<option>`, `--router-<option>` and `--megatron-<option>` that are no flags of ours are passed on by name;
options of slime and Megatron-LM are translated first, see `configs.translate`; settings of earlier versions get one
sentence.

Invariants: all faults of a command line are listed at once; a flag of the schema always wins; a name that is nearly one
of them is a slip, not an option; whether the installed program knows an option and takes its value is checked with that
program (`pipeline.preflight.refusals`, `models.train.megatron.options`), not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import Struct

from configs.flags import OVERRIDE, TABLES, Flag, RefusedValue, flags, flags_by_key, suggestion
from configs.layers import ConfigError, Layer, refusal
from configs.schema.notation import closest_by_words, nearest
from configs.translate import grouped, translate

# Flags of the command itself; the schema may not use these names.
RESERVED: Final = {
    "config": "recipes: TOML files, or names of built-in ones; a later recipe outranks the earlier ones",
    "dry-run": "print the plan (stages, placement, batch arithmetic, staleness, memory) and stop",
    "json": "print errors, and the plan of --dry-run, as JSON; every command has this flag, see docs/control.md",
    "help": "print this text",
    "version": "print the version",
}

# Settings of earlier versions: key -> (the default it had, what to do instead).
RETIRED: Final[Mapping[str, tuple[object, str]]] = {
    "run.hub_processes": (0, "all streams run in the controller's process"),
    "run.hub_shards": (1, "all streams run in the controller's process"),
    "data.strict_data": (False, "--max-bad-rows 0 says the same"),
    "run.train_standby": (False, "a killed trainer starts again from its last checkpoint; see --save-interval"),
}


def retired(key: str) -> str | None:
    """What to do instead of a setting of an earlier version, by its key or its flag's name; None for all others."""
    plain = key.replace("-", "_").removeprefix("no_")
    found = (instead for name, (_, instead) in RETIRED.items() if plain in (name, name.partition(".")[2]))
    return next((f"{key} was removed: {instead}; leave it out" for instead in found), None)


_OWNERS: Final[Mapping[str, str]] = {
    "sglang-": "sglang.sglang_args",
    "router-": "router.router_args",
    "megatron-": "megatron.megatron_args",
}
_SLIP: Final = 0.85  # likeness above which a name is a slip of one of our flags
# Options of the router that may be given several times, each with a URL and perhaps a port.
_REPEATED: Final = {"prefill", "decode", "encode"}


def option_of(name: str, known: Iterable[str]) -> tuple[str, str, str | None] | None:
    """`sglang-mem-fraction-static` -> (`sglang.sglang_args`, `mem_fraction_static`, None).

    The third part is a fault, if the name cannot be passed on. None if the name has none of the prefixes. `known`: the
    names of our own flags, of which `name` is none.
    """
    plain = name.replace("_", "-")
    negative = plain.startswith("no-")
    plain = plain.removeprefix("no-")
    prefix = next((start for start in _OWNERS if plain.startswith(start) and plain != start), None)
    if prefix is None:
        return None
    near = nearest(plain, [flag for flag in known if flag.startswith(prefix)], _SLIP)
    option = plain.removeprefix(prefix)
    key, field = _OWNERS[prefix], option.removeprefix("no-").replace("-", "_")
    fault = None
    if near:
        fault = f"--{name} is no flag; did you mean --{near}?"
    elif negative or option.startswith("no-"):
        fault = (
            f"--{name} turns an option off, but only what is given is passed on; leave it out, or write "
            f"{key}.{field}=false"
        )
    elif "_" in name:
        fault = f"--{name} is no flag, for names are written with dashes; write --{plain}"
    return key, field, fault


def option_value(key: str, option: str, texts: list[str], before: Any) -> Any:
    """True without a value, else the text, else the list of texts. `before`: what an earlier giving of it left."""
    if option in _REPEATED and key == _OWNERS["router-"]:
        return [*(before or []), " ".join(texts)]
    return True if not texts else texts[0] if len(texts) == 1 else texts


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
    reader = _Reader()
    reader.faults += translated.faults
    for _, _, tokens in grouped(translated.argv):
        reader.take(*tokens)
    return Arguments(
        layer=Layer(values=reader.values, labels=reader.labels, edits=reader.edits),
        config=tuple(reader.config),
        faults=tuple(reader.faults),
        notes=translated.notes,
        unread=frozenset(reader.unread),
        **{switch.replace("-", "_"): True for switch in reader.switches},
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
    """Takes the options one by one. What takes an option says how many of the values behind it are its own."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.labels: dict[str, str] = {}
        self.edits: dict[str, str] = {}
        self.faults: list[str] = []
        self.unread: set[str] = set()
        self.switches: set[str] = set()
        self.config: list[str] = []

    def take(self, token: str, *behind: str) -> None:
        """An option, with what stands behind it up to the next option."""
        if token == "-h":
            token = "--help"
        if not token.startswith("--") and not OVERRIDE.match(token):
            self.faults.append(_stray(token))
            return
        name, equals, attached = token.removeprefix("--").partition("=")
        texts = [attached] if equals else list(behind)
        own = self._option(name, texts, inline=bool(equals))
        self.faults += map(_stray, texts[own:] if not equals else ())

    def _option(self, name: str, texts: list[str], *, inline: bool) -> int:
        if "." in name or name in flags_by_key():
            key = name if name.partition(".")[0] in TABLES else name.replace("-", "_")
            return self._dotted(key, texts, inline=inline)
        if name in _by_name():
            return self._flag(_by_name()[name], f"--{name}", texts, inline=inline)
        if name == "config":
            if not any(texts):
                self.faults.append(
                    "--config needs a value: a TOML file or the name of a recipe; see docs/configuration.md"
                )
            self.config += texts
            return len(texts)
        negated = _by_name().get(name.removeprefix("no-"))
        if name in RESERVED or (negated is not None and negated.negatable):
            if inline:
                self.faults.append(f"--{name} takes no value, but got {texts[0]!r}; write --{name} alone")
            if negated is not None:
                self._set(negated, False, f"--{name}")
            elif not inline:
                self.switches.add(name)
            return 0
        if (fault := retired(name)) is not None:
            self.faults.append(f"--{fault}")
        elif (passed := option_of(name, _all_names())) is not None:
            self._pass_on(*passed, name, texts)
        else:
            self._unknown(name)  # its values would only make more noise
        return len(texts)

    def _dotted(self, key: str, texts: list[str], *, inline: bool) -> int:
        flag = flags_by_key().get(key)
        if flag is not None:
            return self._flag(flag, key, texts, inline=inline, dotted=True)
        if key.partition(".")[0] in TABLES:
            self._table(key, texts)
            return 1
        parent, _, inner = key.rpartition(".")
        owner = flags_by_key().get(parent)
        if owner is not None and owner.kind in ("map", "json"):
            self._entry(owner, inner, key, texts)
            return 1
        name = inner.replace("_", "-")
        if (fault := retired(key)) is not None:
            self.faults.append(fault)
        elif name in _by_name():
            right = _by_name()[name].key
            self.faults.append(f"{key} is no key, but {right} is; write {right} or --{name}")
        else:
            self.faults.append(f"{key} is no key of the configuration; {suggestion(key, flags_by_key())}")
        return len(texts)  # each value would add a fault of its own

    def _flag(self, flag: Flag, label: str, texts: list[str], *, inline: bool, dotted: bool = False) -> int:
        if flag.kind == "bool" and not inline:
            known = ("true", "false", *(("none",) if flag.optional else ()))
            own = [text for text in texts[:1] if text in known]
            self._set_from(flag, label, own or ["true"], several=False)
            return len(own)
        own = texts if flag.several else texts[:1]
        if not own:
            self._refused(flag, f"{label} has no value, but {flag.rule}; give for example {label} {flag.example()}")
        else:
            self._set_from(
                flag, label, own, several=flag.several and not (dotted and len(own) == 1 and flag.kind == "list")
            )
        return len(own)

    def _set_from(self, flag: Flag, label: str, texts: list[str], *, several: bool) -> None:
        try:
            self._set(flag, flag.from_texts(texts) if several else flag.from_text(texts[0]), label)
        except RefusedValue as error:
            self._refused(flag, refusal(flag, label, " ".join(texts), str(error)))

    def _entry(self, owner: Flag, inner: str, label: str, texts: list[str]) -> None:
        """`run.scale.reward=4`: one entry of an object."""
        if not texts:
            self._refused(owner, f"{label} has no value, but needs one; write {label}=value")
            return
        try:
            if owner.kind == "map":
                value = owner.from_text(f"{inner}={texts[0]}")
            else:
                value = owner.from_value({inner: _json_or_text(texts[0])})
            self._set(owner, value, label)
        except RefusedValue as error:
            self._refused(owner, refusal(owner, label, texts[0], str(error)))

    def _pass_on(self, key: str, option: str, fault: str | None, name: str, texts: list[str]) -> None:
        """An option of the SGLang server or its router: none, one or several values as they stand."""
        if fault is not None:
            self.faults.append(fault)
            return
        before = self.values.get(key, {}).get(option)
        self._set(flags_by_key()[key], {option: option_value(key, option, texts, before)}, f"--{name}")

    def _table(self, key: str, texts: list[str]) -> None:
        section = key.partition(".")[0]
        known = TABLES[section][0].__struct_fields__
        match key.split("."), texts:
            case [_, _, field], [text, *_] if field in known:
                self.edits[key] = text
            case [_, name, field], [_, *_]:
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

    def _set(self, flag: Flag, value: Any, label: str) -> None:
        """Repeated lists are joined, repeated objects merged, and of repeated scalars the last one counts."""
        old = self.values.get(flag.key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = {**old, **value}
        elif flag.kind == "list" and old and value:
            value = (*old, *value)
        self.values[flag.key] = value
        self.labels[flag.key] = label


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
