"""One decoded row becomes a checked prompt record (prompt, label, metadata, tools), and the report of a whole load.

Invariants: nothing here raises anything but `BadValue`, whose text names the key and the value; a label is text or
None; metadata is a JSON object and tools a JSON list, both as text, so that they travel unchanged; `rows == kept +
sum(skipped.values())`; at most `LISTED` bad rows are kept, the rest is only counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct, field

from configs.schema import Config
from configs.schema.notation import did_you_mean
from stages.graders.registry import is_import_path, normal_import_path

LISTED = 20

SkipKind = Literal[
    "bad json", "missing key", "wrong type", "empty prompt", "template", "too long", "too large", "untrusted"
]


class BadRow(Struct, frozen=True):
    """One row that was skipped, and why."""

    file: str
    line: int  # 1-based line of a text file, 1-based row of a table
    reason: str
    kind: SkipKind

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class SourceCount(Struct):
    """Rows of one entry of `prompt_data`."""

    spec: str
    rows: int = 0
    kept: int = 0


class LoadReport(Struct):
    """Counts of one `PromptSet`."""

    sources: list[SourceCount] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    bad_rows: list[BadRow] = field(default_factory=list)
    unlabelled: int = 0  # kept rows without a label
    rm_types: dict[str, int] = field(default_factory=dict)  # metadata.rm_type of kept rows
    labels: list[str] = field(default_factory=list)  # of the first kept rows, for choosing a grader
    longest_tokens: int = 0  # longest prompt that was tokenised while loading

    @property
    def rows(self) -> int:
        return sum(source.rows for source in self.sources)

    @property
    def kept(self) -> int:
        return sum(source.kept for source in self.sources)

    def add(self, spec: str, rows: int) -> SourceCount:
        """Begin to count the rows of a source."""
        self.sources.append(SourceCount(spec, rows))
        return self.sources[-1]

    def skip(self, bad: BadRow) -> None:
        """Count a skipped row, and list it if the list has room."""
        self.skipped[bad.kind] = self.skipped.get(bad.kind, 0) + 1
        if len(self.bad_rows) < LISTED:
            self.bad_rows.append(bad)

    def skip_histogram(self) -> str:
        """Counts of skipped rows by kind, most frequent first: 'missing key: 3, too long: 1'."""
        ordered = sorted(self.skipped.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{kind}: {count}" for kind, count in ordered)

    def lines(self, listed: int = 3, *, graded: bool = True) -> list[str]:
        """What the user sees: one line per source, then the skipped rows and the first of them. `graded`: rewards come
        from graders, which may need labels."""
        out = [f"{source.spec}: {source.kept} of {source.rows} rows usable" for source in self.sources]
        if self.skipped:
            out.append(f"skipped {sum(self.skipped.values())} rows ({self.skip_histogram()})")
            out.extend(f"  {bad}" for bad in self.bad_rows[:listed])
        if self.unlabelled and graded:
            out.append(f"{self.unlabelled} of {self.kept} usable rows have no label")
        return out


Message = dict[str, object]

_ROLES_HINT = "a message is an object with a text 'role' and a text 'content'"


class BadValue(Exception):
    """Why a row cannot become a prompt."""

    def __init__(self, kind: SkipKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


class RowKeys(Struct, frozen=True):
    """The fields to read from a row."""

    input: str
    label: str | None
    metadata: str
    tools: str
    trusted: frozenset[str] | None = frozenset()  # functions and addresses that metadata may name; None: any

    def wanted(self) -> tuple[str, ...]:
        names = (self.input, self.label, self.metadata, self.tools)
        return tuple(dict.fromkeys(name for name in names if name is not None))


class PromptRow(Struct, frozen=True):
    """A checked row. `prompt` is text, or chat messages that are yet to be rendered."""

    prompt: str | list[Message]
    label: str | None
    metadata: str  # JSON object
    tools: str  # JSON list
    rm_type: str | None  # metadata.rm_type


def parse_row(row: object, keys: RowKeys, columns: Sequence[str] | None = None) -> PromptRow:
    """Check one row. `columns` are the names of all fields of a table of which only some were read."""
    if not isinstance(row, Mapping):
        raise BadValue("wrong type", f"the row is {_kind(row)}, not an object with the key {keys.input!r}")
    if row.get(keys.input) is None:
        raise missing_key(keys.input, list(columns or row))
    metadata, rm_type = _metadata(row.get(keys.metadata), keys)
    return PromptRow(
        prompt=_prompt(row[keys.input], keys.input),
        label=None if keys.label is None else label_text(row.get(keys.label), keys.label),
        metadata=metadata,
        tools=_tools(row.get(keys.tools), keys.tools),
        rm_type=rm_type,
    )


def missing_key(key: str, available: Sequence[str]) -> BadValue:
    """Says which keys there are, and which of them was probably meant."""
    guess = did_you_mean(key, available, cutoff=0.5)
    listed = ", ".join(available[:20]) or "none"
    return BadValue("missing key", f"no key {key!r} (or it is null); keys here: {listed}{guess}")


def label_text(value: object, key: str = "label") -> str | None:
    """Text as it is; numbers and booleans as JSON writes them; lists and objects as JSON; null as None."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise BadValue("wrong type", f"the label {key!r} is {value}, which is not a number that can be compared")
    return _json_text(value, key)


def _prompt(value: object, key: str) -> str | list[Message]:
    if isinstance(value, str):
        if not value.strip():
            raise BadValue("empty prompt", f"the prompt {key!r} is empty")
        return value
    if not isinstance(value, list):
        raise BadValue("wrong type", f"the prompt {key!r} is {_kind(value)}, not text or a list of chat messages")
    if not value:
        raise BadValue("empty prompt", f"the prompt {key!r} is an empty list of messages")
    return [_message(item, key, position) for position, item in enumerate(value)]


def _message(item: object, key: str, position: int) -> Message:
    where = f"message {position} of the prompt {key!r}"
    if not isinstance(item, dict):
        raise BadValue("wrong type", f"{where} is {_kind(item)}; {_ROLES_HINT}")
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or not role:
        raise BadValue("wrong type", f"{where} has no text 'role'; {_ROLES_HINT}")
    if content is None and not item.get("tool_calls"):
        raise BadValue("wrong type", f"{where} ({role}) has neither 'content' nor 'tool_calls'; {_ROLES_HINT}")
    if content is not None and not isinstance(content, str | list):
        raise BadValue("wrong type", f"{where} ({role}) has {_kind(content)} as 'content'; {_ROLES_HINT}")
    return item


def _metadata(value: object, keys: RowKeys) -> tuple[str, str | None]:
    """(JSON object as text, its rm_type)."""
    key = keys.metadata
    if value is None:
        return "{}", None
    if isinstance(value, str):
        value = _decoded(value, key, "an object")
    if not isinstance(value, dict):
        raise BadValue("wrong type", f"the metadata {key!r} is {_kind(value)}; it must be an object")
    rm_type = value.get("rm_type")
    if rm_type is not None and not isinstance(rm_type, str):
        raise BadValue("wrong type", f"{key}.rm_type is {_kind(rm_type)}; it must be the name of a grader")
    if keys.trusted is not None:
        _refuse_code(value, key, keys.trusted)
    return _json_text(value, key), rm_type


def trusted_functions(config: Config) -> frozenset[str] | None:
    """Functions and addresses that rows of the data may name: those that the settings name. None: any."""
    if config.data.trust_data_code:
        return None
    components = (text.partition("=")[2].rpartition("@")[0] for text in config.reward.reward_component)
    reward, generate = config.reward, config.rollout.custom_generate_function_path
    named = (reward.rm_type, reward.custom_rm_path, generate, *components)
    return frozenset(normal_import_path(name) for name in named if name is not None)


def _refuse_code(metadata: Mapping[str, object], key: str, trusted: frozenset[str]) -> None:
    """Refuse a row that names code, or an address to send responses to, unless the run itself names it.

    Data comes from other people: a name of a row would be imported and called with text of the row.
    """
    named = {name: metadata.get(name) for name in ("custom_rm_path", "generate_function_path")}
    rm_type = metadata.get("rm_type")
    if isinstance(rm_type, str) and (is_import_path(rm_type) or rm_type.startswith("remote:")):
        named["rm_type"] = rm_type
    for name, path in named.items():
        if path and not (isinstance(path, str) and normal_import_path(path) in trusted):
            flag = "--custom-generate-function-path" if name == "generate_function_path" else "--reward-component"
            raise BadValue(
                "untrusted",
                f"{key}.{name} is {path!r}, which no setting of this run names; name it, for example with {flag}, or "
                "add --trust-data-code if you trust the author of the data",
            )


def _tools(value: object, key: str) -> str:
    if value is None or value == "":
        return "[]"
    if isinstance(value, str):
        value = _decoded(value, key, "a list")
    if not isinstance(value, list):
        raise BadValue("wrong type", f"the tools {key!r} are {_kind(value)}; they must be a list of tool schemas")
    for position, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise BadValue("wrong type", f"tool {position} of {key!r} is {_kind(tool)}; it must be a schema object")
    return _json_text(value, key)


def _decoded(text: str, key: str, wanted: str) -> object:
    try:
        value: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise BadValue("wrong type", f"{key!r} is no JSON text; it must be {wanted} or the JSON text of one") from None
    return value


def _json_text(value: object, key: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadValue("wrong type", f"the value of {key!r} cannot be written as JSON ({error})") from None


def _kind(value: object) -> str:
    """A JSON word for the type of a value, with an article."""
    if value is None:
        return "null"
    words = {"bool": "a boolean", "str": "text", "int": "a number", "float": "a number", "dict": "an object"}
    return words.get(type(value).__name__, f"a {type(value).__name__}")
