"""How the fields of the schema are written: aliases for bounds, and the setting that makes a field be read.

A field is `name: Type = default`. The string below it is its description in `--help` and docs/configuration.md.
`Annotated[Positive, ReadBy("--use-tis")]`: nothing reads the field unless the run has that setting. An option that
nothing reads is refused; the grammar of conditions is in `configs.rules.unread`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]  # both ends included
Factor = Annotated[float, Meta(gt=0, le=1)]  # above 0
Decay = Annotated[float, Meta(ge=0, lt=1)]  # below 1


class ReadBy(Struct, frozen=True):
    """What must be set for a field to be read, as a user writes it: `--engine simulated`, `--use-tis`, `a judge`."""

    condition: str


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections and tables. The first line of a docstring is the title in `--help`."""

    READ_BY: ClassVar[str] = ""  # as `ReadBy`, for all fields of the section
