"""What a user reads about the flags: `--help`, and the tables of docs/configuration.md.

Invariant: both are made from the flag table, so neither can name a flag that does not exist. `python -m
configs.help` writes the tables into the page again.
"""

from __future__ import annotations

import ast
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

from configs.command_line import RESERVED
from configs.flags import SECTIONS, TABLES, Flag, flags, show
from configs.load import recipe_names
from configs.presets import preset_names
from configs.schema import Config

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
END: Final = "<!-- end of the generated tables -->"
USAGE: Final = "usage: python launch.py [--config RECIPE ...] [--flag value ...] [section.key=value ...]"
OTHER: Final = (
    "       python launch.py samples RUN    show samples of a run in the terminal; see samples --help\n"
    "       python launch.py status RUN     what a running run does; also scale, set, pause, resume, save, drain"
)
_COLUMN = 34


def render_help(width: int | None = None) -> str:
    """The text of `--help`, grouped by section."""
    columns = width or _terminal_width()
    lines = [USAGE, OTHER, ""]
    lines += textwrap.wrap(
        "Without --prompt-data, --config and --hf-checkpoint the recipe quickstart runs; recipes that name no data and "
        "no model run on the toy problem. Precedence: command line > later recipe > earlier recipe > preset of the "
        "model > preset of the mode > default.",
        columns,
    )
    lines += textwrap.wrap(f"Recipes (--config): {', '.join(recipe_names())}.", columns, break_on_hyphens=False)
    lines += textwrap.wrap(f"Presets (--model): {', '.join(preset_names())}.", columns, break_on_hyphens=False)
    lines += ["", "The command"]
    for name, text in RESERVED.items():
        lines += _entry(f"--{name} RECIPE ..." if name == "config" else f"--{name}", text, columns)
    for section in SECTIONS:
        lines += ["", f"{section_title(section)} [{section}]"]
        for flag in _members(section):
            lines += _entry(_usage(flag), f"{description(flag)}{_many(flag)}{_default(flag)}", columns)
    lines += ["", "Dotted overrides work for every key: train.lr=1e-4, --train.lr 1e-4, run.scale.reward=4."]
    return "\n".join(lines) + "\n"


def render_tables() -> str:
    """One Markdown table for each section."""
    parts = []
    for section in SECTIONS:
        head = f"### {section_title(section)}\n\nSection `[{section}]`\n\n| flag | key | values | default | meaning |"
        parts.append("\n".join([head, "|---|---|---|---|---|", *map(_row, _members(section))]))
    return "\n\n".join(parts) + "\n"


def render_page(page: str) -> str:
    """The page with its tables made anew. Raises ValueError if it lacks the two marks."""
    return with_tables(page, "configs.help", render_tables())


def with_tables(page: str, module: str, tables: str) -> str:
    """A page of the documentation with the tables that a module makes. Raises ValueError if it lacks the two marks."""
    mark = f"<!-- begin of the generated tables: python -m {module} -->"
    head, begin, rest = page.partition(mark)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks the marks {mark!r} and {END!r}, between which the tables stand; add them")
    return f"{head}{mark}\n\n{tables}\n{END}{tail}"


def section_title(section: str) -> str:
    """The first line of the docstring of the section's struct."""
    struct = TABLES[section][0] if section in TABLES else type(getattr(Config(), section))
    return (struct.__doc__ or section).partition("\n")[0].rstrip(".")


def description(flag: Flag) -> str:
    """The string below the flag's field in `configs/schema`, as one line."""
    return _field_texts(flag.owner.__module__)[flag.owner.__name__, flag.key.rpartition(".")[2]]


@cache
def _field_texts(module: str) -> Mapping[tuple[str, str], str]:
    """(Class, field) -> the string below the field. Python keeps these strings nowhere, so the source is read."""
    source = Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8")
    found = {}
    for node in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        for field, text in pairwise(node.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found[node.name, name] = " ".join(words.split())
    return found


def _members(section: str) -> Iterator[Flag]:
    return (flag for flag in flags() if flag.key.partition(".")[0] == section)


def _entry(usage: str, text: str, columns: int) -> Iterator[str]:
    start = f"  {usage}"
    if len(start) > _COLUMN - 2:
        yield start
        start = ""
    lines = textwrap.wrap(text, max(columns - _COLUMN, 30)) or [""]
    yield f"{start:<{_COLUMN}}{lines[0]}"
    for line in lines[1:]:
        yield " " * _COLUMN + line


def _usage(flag: Flag) -> str:
    if flag.name is None:
        return f"{flag.key}={'[...]' if flag.kind == 'tables' else _values(flag)}"
    if flag.negatable:
        return f"--{flag.name}, --no-{flag.name}"
    return f"--{flag.name} {_values(flag)}"


def _values(flag: Flag) -> str:
    if flag.choices:
        return "NAME" if _many(flag) else f"{{{','.join(flag.choices)}}}"
    if flag.kind == "bool":
        return "true|false"
    if flag.kind in ("list", "map"):
        return "NAME=N ..." if flag.kind == "map" else "A [B ...]"
    if flag.kind == "json":
        return "JSON"
    return {"whole": "N", "a": "X"}.get(flag.rule.removeprefix("must be a ").split()[0], _scalar(flag))


def _many(flag: Flag) -> str:
    """Choices that are too long to stand beside the flag."""
    text = ", ".join(flag.choices or ())
    return f"; one of {text}" if len(text) > 80 else ""


def _scalar(flag: Flag) -> str:
    return "X" if "a number" in flag.rule else "TEXT"


def _default(flag: Flag) -> str:
    if flag.default in (None, (), {}) and not isinstance(flag.default, bool | int | float):
        return ""
    return f" (default: {show(flag.default)})"


def _row(flag: Flag) -> str:
    name = f"`--{flag.name}`" if flag.name else "-"
    if flag.negatable:
        name += f", `--no-{flag.name}`"
    rule = flag.rule.removeprefix("must be ")
    default = "-" if not _default(flag) else f"`{show(flag.default)}`"
    cells = (name, f"`{flag.key}`", rule, default, description(flag))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _terminal_width() -> int:
    try:
        return min(os.get_terminal_size(sys.stdout.fileno()).columns, 140)
    except (OSError, ValueError):
        return 110


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
