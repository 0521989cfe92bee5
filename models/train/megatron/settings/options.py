"""`--megatron-<option>`: names and values checked against Megatron-core's dataclasses, converted, and assigned to them.

`option_faults` reads the installed source only (`option_fields`), so that it can be asked before anything is started.
`split_options` is for the processes that train: its values are ready for the dataclasses.

Invariants: a field that Sluice sets itself is refused with the flag to use instead; a field that several dataclasses
have goes to all of them; nothing is passed on that Megatron-core does not know.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from configs.schema.did_you_mean import nearest
from models.errors import TrainConfigInvalid
from models.train.megatron.settings.option_fields import DTYPE, DTYPES, NONE, Group, Kind, fields_of, known_fields
from models.train.megatron.settings.set_by_sluice import SET_BY_SLUICE


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
    """What is wrong with `--megatron-<option>`, one sentence each.

    To be asked before anything is started: takes milliseconds, imports nothing of torch or Megatron-core.

    `args`: the value of `megatron.megatron_args`. Without megatron-core that is the one fault, also for no options.
    """
    try:
        known = known_fields()
        return tuple(fault for name, value in args.items() if (fault := _fault(name, value, known)) is not None)
    except TrainConfigInvalid as error:
        return (str(error),)


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
            options[group][name] = _real(*_convert(fields_of(group)[name], args[name]))
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
        kinds = fields_of(group)[name]
        if not set(kinds) - {NONE}:
            return f"{label} is {shown}, but that field takes an object of Python, not text; leave it out"
        try:
            _convert(kinds, value)
        except _Refused as refused:
            return f"{label} is {shown}, but {refused}"
    return None


def _convert(kinds: tuple[Kind, ...], value: Any) -> tuple[Kind, Any]:
    """The alternative of the field's type that takes the value, with the value in its type."""
    for reading in _readings(value):
        for kind in kinds:
            try:
                return kind, msgspec.convert(reading, kind.type)
            except msgspec.ValidationError:
                continue
    raise _Refused(f"must be {' or '.join(kind.rule for kind in kinds)}; give for example {kinds[0].example}")


def _readings(value: Any) -> Iterator[Any]:
    """What a value may mean, the likeliest first: text as what it spells and as itself, an item as a list of one."""
    if isinstance(value, list | tuple):
        yield [_spelt(item) for item in value]
        yield value
    else:
        yield from (_spelt(value), value, [_spelt(value)], [value])


def _spelt(value: Any) -> Any:
    """What a text spells in a dataclass's type."""
    if not isinstance(value, str):
        return value
    words = {"true": True, "false": False, "none": None}
    if value in words:
        return words[value]
    for read in (int, float):
        try:
            return read(value)
        except ValueError:
            continue
    return value


def _real(kind: Kind, value: Any) -> Any:
    """What the dataclass wants in place of a name: a dtype of torch, a member of an enum."""
    if kind.stands_for == DTYPE:
        return getattr(importlib.import_module("torch"), DTYPES[value])
    if kind.stands_for:
        return getattr(importlib.import_module("megatron.core.transformer.enums"), kind.stands_for)[value]
    return value
