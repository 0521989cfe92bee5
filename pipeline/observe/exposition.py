"""Prometheus text (exposition format 0.0.4): families of samples, written, read and joined.

Invariants: each family is written once, its samples together, however many sources it came from; a label that a source
brings under a name which we set is kept as `exported_<name>`, as Prometheus itself does; a line that is no sample is
left out, so that one odd source cannot make the whole text unreadable.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Kind = Literal["counter", "gauge", "histogram", "summary", "untyped"]
KINDS: Final = ("counter", "gauge", "histogram", "summary", "untyped")

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*\s*=\s*"(?:[^"\\]|\\.)*"'
_SAMPLE = re.compile(rf"^({_NAME})\s*(?:\{{\s*((?:{_LABEL}\s*,?\s*)*)\}})?\s+([^\s#]+)(?:\s+-?\d+)?\s*$")
_ONE_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*("(?:[^"\\]|\\.)*")')
_PARTS = ("_bucket", "_sum", "_count")  # of a histogram or a summary


@dataclass
class Family:
    """Samples of one name: `name{labels} value` each, with the kind and the help of the first who told them."""

    name: str
    kind: Kind = "untyped"
    help: str = ""
    samples: list[str] = field(default_factory=list)

    def add(self, value: float | None, **labels: str) -> Family:
        """One more sample; None is no sample."""
        if value is not None:
            self.samples.append(sample(self.name, labels, value))
        return self


def sample(name: str, labels: Mapping[str, str], value: float) -> str:
    """One line."""
    written = ",".join(f'{key}="{escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{written}}} {number(value)}" if written else f"{name} {number(value)}"


def escaped(text: str) -> str:
    """A label's value between its quotes."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def number(value: float) -> str:
    """As Prometheus writes numbers."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1 << 53 else repr(float(value))


def read(text: str, labels: Mapping[str, str]) -> list[Family]:
    """Families of a text, with labels added to every sample; time stamps are left out."""
    families: dict[str, Family] = {}
    for line in text.split("\n"):  # a label may hold what splitlines takes for an end of line
        line = line.strip()
        if line.startswith("#"):
            _describe(families, line)
        elif (match := _SAMPLE.match(line)) and _is_number(match[3]):
            name, given = match[1], _ONE_LABEL.findall(match[2] or "")
            kept = [f"{f'exported_{key}' if key in labels else key}={value}" for key, value in given]
            written = ",".join([f'{key}="{escaped(value)}"' for key, value in labels.items()] + kept)
            _of(families, name).samples.append(f"{name}{{{written}}} {match[3]}" if written else f"{name} {match[3]}")
    return [family for family in families.values() if family.samples]


def _describe(families: dict[str, Family], line: str) -> None:
    """Take a HELP or TYPE line; other comments say nothing."""
    words = line.split(None, 3)
    if len(words) < 3 or words[1] not in ("HELP", "TYPE") or not re.fullmatch(_NAME, words[2]):
        return
    family = families.setdefault(words[2], Family(words[2]))
    said = words[3] if len(words) > 3 else ""
    if words[1] == "HELP":
        family.help = said
    elif said in KINDS:
        family.kind = said  # type: ignore[assignment]  # one of the words of Kind


def _of(families: dict[str, Family], name: str) -> Family:
    """The family of a sample: its own name, or that of the histogram or summary whose part it is."""
    for part in _PARTS:
        whole = families.get(name.removesuffix(part)) if name.endswith(part) else None
        if whole is not None and whole.kind in ("histogram", "summary"):
            return whole
    return families.setdefault(name, Family(name))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def write(families: Iterable[Family]) -> str:
    """The text of all families; those of equal name become one."""
    joined: dict[str, Family] = {}
    for family in families:
        into = joined.setdefault(family.name, Family(family.name, family.kind, family.help))
        into.samples += family.samples
    lines: list[str] = []
    for family in joined.values():
        if not family.samples:
            continue
        lines += [f"# HELP {family.name} {family.help}"] if family.help else []
        lines += [f"# TYPE {family.name} {family.kind}", *family.samples]
    return "".join(f"{line}\n" for line in lines)
