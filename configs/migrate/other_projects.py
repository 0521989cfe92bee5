"""A configuration of verl, TRL or prime-rl as flags of this project, and a report of what became of each key.

What each key becomes stands in `projects/*.toml`, as data, and where values must be counted in `other_rules`. A file is
recognised by keys that only one of the projects has.

Invariants: every key of a file is answered: by flags, as what happens anyway, in a sentence, or as unknown by its name;
defaults of the project that differ from ours are added; nothing of a file is run.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from configs.flags import flags
from configs.layers import ConfigError
from configs.migrate.other_rules import RULES, Given, Unclear, listed, words
from configs.schema.notation import as_number, did_you_mean
from configs.translate import Answer, grouped

SUFFIXES: Final = (".yaml", ".yml", ".json", ".toml")
_PROJECTS: Final = Path(__file__).parent / "projects"
_EVALUATION: Final = re.compile(r"eval-|n-samples-per-eval-prompt|skip-eval")
_REFERENCE: Final = re.compile(r"\$\{(\w+(?:\.\w+)+)\}")
_NOTHING: Final = (None, "null", "None")
Found = tuple[tuple[str, ...], Answer | None]  # keys, and what becomes of them; None: unknown keys


class OnlyIf(Struct, frozen=True, forbid_unknown_fields=True):
    """`keys` are read, and `flags` given, if a key like `key` has one of `values`, or is on where there are none."""

    key: str
    keys: tuple[str, ...]
    values: tuple[object, ...] = ()
    flags: tuple[str, ...] = ()

    def holds(self, given: Given) -> bool:
        found = [item for key, value in given.values.items() if fnmatchcase(key, self.key) for item in listed(value)]
        return any(item in self.values if self.values else item not in (False, 0, "no", "") for item in found)


class Project(Struct, frozen=True, forbid_unknown_fields=True):
    """One file of `projects/`. Keys are dotted; in `taken`, `not_here` and `only_if` they may have stars.

    `marks`: keys by which a file is known. `renamed`: earlier names. `flags`: key -> flags that take the same values,
    with ? those that 0 and less turn off there and leaving them out does here. `choices`: key -> value -> flags.
    `taken`: what happens anyway; with a value, only with that one. `not_here`: what to do instead. `defaults` and
    `added`: defaults of the project that differ from ours.
    """

    name: str
    nested: bool
    marks: tuple[str, ...]
    rewards: str
    added: tuple[tuple[str, ...], ...]
    flags: dict[str, str]
    choices: dict[str, dict[str, str]]
    taken: dict[str, object]
    not_here: dict[str, str]
    defaults: dict[str, object]
    only_if: tuple[OnlyIf, ...]
    renamed: dict[str, str] = {}


@cache
def projects() -> Mapping[str, Project]:
    tables = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(_PROJECTS.glob("*.toml"))]
    plain = [table | {name: flat(table[name]) for name in ("flags", "taken", "defaults")} for table in tables]
    return {project.name: project for project in msgspec.convert(plain, list[Project])}


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys. An empty table remains."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def converted(path: Path, arguments: tuple[str, ...] | None) -> tuple[list[str], list[str]]:
    """Flags, and the lines of the report. `arguments`: of verl's command in a shell script; None: the file is read.
    Raises `ConfigError`."""
    project, settings = _read(path) if arguments is None else (projects()["verl"], _overrides(arguments))
    settings = {key: _referred(value, settings) for key, value in settings.items()}
    written = {project.renamed.get(key, key): key for key, value in settings.items() if value not in _NOTHING}
    settings = {key: settings[name] for key, name in written.items()}
    found = list(_answers(project, Given(project.defaults | settings, written), settings))
    taken = [(keys, answer) for keys, answer in found if answer is not None and answer.argv]
    held = any("--eval-prompt-data" in answer.argv for _, answer in taken)
    own, added, unread, names = list[str](), list[str](), list[str](), set[str]()
    extra = [((), Answer(tokens)) for tokens in project.added]
    for keys, answer in sorted([*taken, *extra], key=lambda one: settings.keys().isdisjoint(one[0])):
        by_default = settings.keys().isdisjoint(keys)
        for name, _, tokens in grouped(answer.argv):
            if not held and _EVALUATION.match(name):
                unread += () if by_default else tokens
            elif {"num-epoch": "num-rollout"}.get(name, name) not in names:
                (added if by_default else own).extend(tokens)
        names |= {name for name, *_ in grouped(answer.argv)}
    notes = [f"{path}: {project.name}, {len(settings)} keys", *_report(project, settings, written, found)]
    if unread:
        notes.append(f"left out, for there is no --eval-prompt-data: {shlex.join(unread)}")
    if added:
        notes.append(f"added, for {project.name}'s defaults are others: {shlex.join(added)}")
    return [*own, *added], [*notes, f"rows and rewards: {project.rewards}"]


def _read(path: Path) -> tuple[Project, dict[str, Any]]:
    decode: Mapping[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": msgspec.json.decode}
    try:
        text = path.read_text(encoding="utf-8")
        table = decode.get(path.suffix, msgspec.yaml.decode)(text)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read as {path.suffix[1:].upper()} ({error}); correct the file") from error
    for project in projects().values():
        if isinstance(table, dict) and set(project.marks) & set(table):
            return project, flat(table) if project.nested else table
    marks = "; ".join(f"of {project.name} {', '.join(project.marks)}" for project in projects().values())
    raise ConfigError(f"{path} has no key by which a configuration is known ({marks}); give a file that has one")


def _overrides(arguments: tuple[str, ...]) -> dict[str, Any]:
    """`key=value` of a command of verl, and its options in two words."""
    found, rest = {}, iter(arguments)
    for word in rest:
        text = f"{word}={next(rest, '')}" if word.startswith("--") and "=" not in word else word
        key, equals, value = text.lstrip("+~-").partition("=")
        if equals:
            found[key] = _typed(value)
    return found


def _typed(text: str) -> Any:
    try:
        value = msgspec.yaml.decode(text)
    except (msgspec.MsgspecError, ValueError):
        return text
    plain = value is None or isinstance(value, bool | int | float | str | list)
    return value if plain or text.startswith("{") else text


def _referred(value: Any, settings: Mapping[str, Any]) -> Any:
    """`${data.max_prompt_length}` in a file is the value of that key."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return settings.get(match[1]) if match else value


def _same(value: object, wanted: object) -> bool:
    one, other = as_number(value), as_number(wanted)
    return one == other if None not in (one, other) else fnmatchcase(str(value).lower(), str(wanted).lower())


def _answers(project: Project, given: Given, settings: Mapping[str, Any]) -> Iterator[Found]:
    left = [key for key in dict.fromkeys([*project.flags, *given.values]) if key in given.values]
    for read, rule in RULES[project.name].items():
        if keys := tuple(key for key in read if key in left):
            left = [key for key in left if key not in keys]
            try:
                yield keys, rule(given)
            except Unclear as error:
                yield keys, Answer(fault=str(error))
    for guard in project.only_if:
        if guard.flags and guard.holds(given):
            yield tuple(key for key in given.values if fnmatchcase(key, guard.key)), Answer(guard.flags)
    for key in left:
        guards = [guard for guard in project.only_if if any(fnmatchcase(key, name) for name in guard.keys)]
        read_at_all = all(guard.holds(given) for guard in guards)
        yield (key,), _answer(project, key, given.values[key], own=key in settings) if read_at_all else Answer()


def _answer(project: Project, key: str, value: Any, *, own: bool) -> Answer | None:
    reasons = [why for name, why in project.not_here.items() if fnmatchcase(key, name)]
    if key in project.flags:
        return Answer(tuple(w for name in project.flags[key].split() for w in _flag_words(name, value, own=own)))
    if key in project.choices:
        choices, found = project.choices[key], [str(item).lower() for item in listed(value)]
        if unknown := [word for word in found if word not in choices]:
            return Answer(fault=reasons[0] if reasons else f"{unknown[0]} is not here, but {', '.join(choices)}")
        return Answer(tuple(word for name in found for word in choices[name].split(" ") if word))
    taken = [wanted for name, wanted in project.taken.items() if fnmatchcase(key, name)]
    if value == {} or any(wanted == "" or _same(value, wanted) for wanted in taken):
        return Answer()
    reasons += [f"it can only be {wanted} here" for wanted in taken]
    return Answer(fault=reasons[0]) if reasons else None


def _flag_words(name: str, value: Any, *, own: bool) -> tuple[str, ...]:
    """One flag; none for what the run does without it. `own`: the file says so, not a default."""
    plain = name.removesuffix("?")
    flag = next((flag for flag in flags() if flag.name == plain), None)
    if flag is not None and flag.kind == "bool":
        on = str(value).lower() == "true"
        return () if on is flag.default else (f"--{'' if on else 'no-'}{plain}",)
    idle = flag is not None and (flag.read_by or not own) and flag.default is not None and _same(value, flag.default)
    off = plain != name and (as_number(value) or 0) <= 0 and as_number(value) is not None
    return () if idle or off else (f"--{plain}", *words(value))


def _report(
    project: Project, settings: Mapping[str, Any], written: Mapping[str, str], found: list[Found]
) -> Iterator[str]:
    shown = {key: f"{name}={_short(settings[key])}" for key, name in written.items()}
    own = [([key for key in keys if key in settings], answer) for keys, answer in found]
    own = [(keys, answer) for keys, answer in own if keys]
    loud = {key for keys, answer in own if answer != Answer() for key in keys}
    silent = [key for keys, answer in own if answer == Answer() for key in keys if key not in loud]
    if silent:
        yield f"left out, for it is so anyway: {' '.join(written[key] for key in dict.fromkeys(silent))}"
    refused = {key for keys, answer in own if answer is None or answer.fault for key in keys}
    for keys, answer in own:
        if answer is not None and answer.argv and not (len(keys) == 1 and keys[0] in project.flags):
            taken = [key for key in keys if key not in refused] or keys
            yield f"changed: {' '.join(shown[key] for key in taken)} -> {shlex.join(answer.argv)}"
    yield from (f"note: {answer.note}" for _, answer in found if answer is not None and answer.note)
    for fault in dict.fromkeys(answer.fault for _, answer in own if answer is not None and answer.fault):
        named = [key for keys, answer in own if answer is not None and answer.fault == fault for key in keys]
        yield f"left out, not here: {', '.join(shown[key] for key in named)}: {fault}"
    known = [*project.flags, *project.choices, *project.taken, *(key for keys in RULES[project.name] for key in keys)]
    yield from (
        f"left out, unknown: {key}{did_you_mean(key, known)}" for keys, answer in own if answer is None for key in keys
    )


def _short(value: object) -> str:
    text = " ".join(words(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
