"""`--megatron-<option>`: names and values checked against Megatron-core's dataclasses, converted, and assigned to them.

`option_faults` reads the installed source only (`option_fields`), so that it can be asked before anything is started.
`split_options` is for the processes that train: its values are ready for the dataclasses.

Invariants: a field that Sluice sets itself is refused with the flag to use instead; a field that several dataclasses
have goes to all of them; nothing is passed on that Megatron-core does not know.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from configs.schema import Config
from configs.schema.did_you_mean import nearest
from models.train.errors import TrainConfigInvalid
from models.train.megatron.option_fields import Field, Group, Kind, enum_members, fields_of, known_fields
from models.train.megatron.set_by_sluice import SET_BY_SLUICE

_DTYPES: Final[Mapping[str, str]] = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp8": "uint8",  # how Megatron-core stores optimizer moments in eight bits
}


@dataclass(frozen=True)
class MegatronOptions:
    """Keyword arguments for TransformerConfig or MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig.

    They go over what Sluice sets itself: `TransformerConfig(**{**own, **options.transformer})`.
    """

    transformer: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)


class _Refused(Exception):
    """A value that a field does not take. The text is the rule."""


def option_faults(args: Mapping[str, Any]) -> tuple[str, ...]:
    """What is wrong with `--megatron-<option>`, one sentence each; nothing of Megatron-core is imported.

    `args`: the value of `megatron.megatron_args`. Without megatron-core that is the one fault, also for no options.
    """
    try:
        known = known_fields()
        return tuple(fault for name, value in args.items() if (fault := _fault(name, value, known)) is not None)
    except TrainConfigInvalid as error:
        return (str(error),)


def preflight_faults(config: Config) -> tuple[str, ...]:
    """What only the installed megatron-core can say about a configuration; nothing for the other backends.

    To be asked before anything is started: takes milliseconds, imports nothing of torch or Megatron-core.
    """
    return option_faults(config.megatron.megatron_args) if config.train.train_backend == "megatron" else ()


def split_options(args: Mapping[str, Any]) -> MegatronOptions:
    """Options by dataclass, converted to the types of the fields. Raises `TrainConfigInvalid` with all faults.

    Enums and torch dtypes are made real here, which imports torch and `megatron.core.transformer.enums`, but only
    where an option has one.
    """
    if not args:
        return MegatronOptions()
    if faults := option_faults(args):
        raise TrainConfigInvalid("\n".join(faults))
    options: dict[Group, dict[str, Any]] = {"transformer": {}, "optimizer": {}, "ddp": {}}
    for name, groups in known_fields().items():
        for group in groups if name in args else ():
            kind, value = _convert(fields_of(group)[name], args[name])
            options[group][name] = _real(kind, value)
    return MegatronOptions(**options)


def _fault(name: str, value: Any, known: Mapping[str, tuple[Group, ...]]) -> str | None:
    label = f"--megatron-{name.replace('_', '-')}"
    if name not in known:
        near = nearest(name, [one for one in known if one not in SET_BY_SLUICE])
        cure = f"did you mean --megatron-{near.replace('_', '-')}?" if near else "leave it out"
        return (
            f"{label} is no field of the installed megatron-core's TransformerConfig, OptimizerConfig or "
            f"DistributedDataParallelConfig; {cure}"
        )
    shown = value if isinstance(value, str) else repr(value).lower() if isinstance(value, bool) else repr(value)
    if name in SET_BY_SLUICE:
        return f"{label} is {shown}, but {SET_BY_SLUICE[name]}"
    for group in known[name]:
        found = fields_of(group)[name]
        if all(kind.name in ("opaque", "none") for kind in found.kinds):
            return f"{label} is {shown}, but that field takes an object of Python, not text; leave it out"
        try:
            _convert(found, value)
        except _Refused as refused:
            return f"{label} is {shown}, but {refused}"
    return None


def _convert(known: Field, value: Any) -> tuple[Kind, Any]:
    """The first alternative of the field's type that takes the value, with the value in its type."""
    for kind in sorted(known.kinds, key=_last):
        taken, converted = _as_kind(kind, value)
        if taken:
            return kind, converted
    rule = " or ".join(str(kind) for kind in known.kinds if kind.name != "opaque")
    raise _Refused(f"must be {rule}; give for example {_example(known)}")


def _as_kind(kind: Kind, value: Any) -> tuple[bool, Any]:
    """Whether the alternative takes the value, and what it then is."""
    if kind.name == "list":
        items = value if isinstance(value, list | tuple) else [value]
        found = [_first(kind.items, item) for item in items]
        return all(taken for taken, _ in found), [item for _, item in found]
    if isinstance(value, bool):
        return kind.name == "bool", value
    if isinstance(value, int | float):
        whole = isinstance(value, int)
        if kind.name == "int":
            return whole, value
        return kind.name == "float", float(value)
    return _from_text(kind, value) if isinstance(value, str) else (False, None)


def _last(kind: Kind) -> int:
    """Text takes any text, and a list any single item: they are tried when nothing else fits."""
    return {"str": 1, "list": 2}.get(kind.name, 0)


def _first(kinds: tuple[Kind, ...], value: Any) -> tuple[bool, Any]:
    for kind in sorted(kinds, key=_last):
        taken, converted = _as_kind(kind, value)
        if taken:
            return True, converted
    return False, None


def _from_text(kind: Kind, text: str) -> tuple[bool, Any]:
    match kind.name:
        case "none":
            return text == "none", None
        case "bool":
            return text in ("true", "false"), text == "true"
        case "int" | "float":
            number = _number(text)
            fits = number is not None and (kind.name == "float" or isinstance(number, int))
            return fits, float(number) if fits and number is not None and kind.name == "float" else number
        case "choice":
            return text in kind.choices, text
        case "dtype":
            return text in _DTYPES, text
        case "enum":
            return text in enum_members(kind.enum), text
        case "str":
            return True, text
    return False, None


def _number(text: str) -> int | float | None:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return None


def _example(known: Field) -> str:
    for kind in known.kinds:
        match kind.name:
            case "choice":
                return kind.choices[0]
            case "enum":
                return enum_members(kind.enum)[0]
            case "dtype":
                return "bf16"
            case "bool":
                return "true"
            case "int" | "float":
                return "1"
    return "text"


def _real(kind: Kind, value: Any) -> Any:
    """What the dataclass wants in place of a name: a dtype of torch, a member of an enum."""
    if kind.name == "dtype" and value is not None:
        return getattr(importlib.import_module("torch"), _DTYPES[value])
    if kind.name == "enum":
        return getattr(importlib.import_module("megatron.core.transformer.enums"), kind.enum)[value]
    return value
