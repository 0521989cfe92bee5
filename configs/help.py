"""Text made from the flags and the presets: `--help`, and the generated tables of the documentation.

Invariant: all of it is made from the flag table, the presets and the estimates, so it cannot name a flag that does not
exist. `python -m configs.help` writes the tables of docs/configuration.md and docs/models.md again.
"""

from __future__ import annotations

import ast
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final

from configs.command_line import RESERVED
from configs.flags import SECTIONS, TABLES, Flag, flags, show
from configs.load import load, preset_names, recipe_names
from configs.plan.gpus import gpus_of, layout_of
from configs.plan.run_estimate import RunEstimate, estimate_run
from configs.resolve import resolve
from configs.schema import Config
from configs.schema.model_shapes import read_shape

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
BEGIN: Final = "<!-- begin of the generated tables: python -m configs.help -->"
END: Final = "<!-- end of the generated tables -->"
USAGE: Final = "usage: python launch.py [--config RECIPE ...] [--flag value ...] [section.key=value ...]"
OTHER: Final = (
    "       python launch.py eval CHECKPOINT    evaluate a model or a run's checkpoint; see eval --help\n"
    "       python launch.py samples RUN    show samples of a run in the terminal; see samples --help\n"
    "       python launch.py export RUN --best    copy the model of the best evaluated version; see export --help\n"
    "       python launch.py status RUN     what a running run does; see docs/control.md for it and\n"
    "                                       scale, set, pause, resume, save, drain, rollback, kill\n"
    "       python launch.py view RUN       the run in a browser, while it goes on or later; see view --help\n"
    "       python launch.py watch RUN      the live table of a run that goes on elsewhere\n"
    "       python launch.py report RUN     the page of a run as one HTML file; see report --help\n"
    "       python launch.py compare RUN RUN ...    runs side by side; with flags: which mode to take\n"
    "       python launch.py convert FILE   the command of a script or configuration of slime, verl, TRL, prime-rl"
)
_COLUMN = 34


def render_help(width: int | None = None) -> str:
    """The text of `--help`, grouped by section."""
    columns = width or min(shutil.get_terminal_size((110, 0)).columns, 140)
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
    head = "flag | key | values | default | meaning"
    parts = [
        f"### {section_title(section)}\n\nSection `[{section}]`\n\n{_table(head, map(_cells, _members(section)))}"
        for section in SECTIONS
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """In Markdown. `head`: the names of the columns, with | between."""
    lines = (" | ".join(cell.replace("|", "\\|") for cell in cells) for cells in rows)
    return "\n".join([f"| {head} |", f"|{'---|' * (head.count('|') + 1)}", *(f"| {line} |" for line in lines)])


def render_page(page: str, tables: str) -> str:
    """A page of the documentation with these tables. Raises ValueError if it lacks the two marks."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks the marks {BEGIN!r} and {END!r}, between which the tables stand; add them")
    return f"{head}{BEGIN}\n\n{tables}\n{END}{tail}"


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
    start, indent = f"  {usage}", " " * _COLUMN
    if len(start) > _COLUMN - 2:
        yield start
        start = ""
    width = max(columns, _COLUMN + 30)
    yield from textwrap.wrap(text, width, initial_indent=f"{start:<{_COLUMN}}", subsequent_indent=indent) or [start]


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
    return "N" if "a whole number" in flag.rule else "X" if "a number" in flag.rule else "TEXT"


def _many(flag: Flag) -> str:
    """Choices that are too long to stand beside the flag."""
    text = ", ".join(flag.choices or ())
    return f"; one of {text}" if len(text) > 80 else ""


def _default(flag: Flag) -> str:
    if flag.default in (None, (), {}) and not isinstance(flag.default, bool | int | float):
        return ""
    return f" (default: {show(flag.default)})"


def _cells(flag: Flag) -> Sequence[str]:
    name = f"`--{flag.name}`" if flag.name else "-"
    if flag.negatable:
        name += f", `--no-{flag.name}`"
    rule = flag.rule.removeprefix("must be ")
    default = "-" if not _default(flag) else f"`{show(flag.default)}`"
    return name, f"`{flag.key}`", rule, default, description(flag)


# The run that the tables are about.
TABLE_RUN: Final = ("--prompt-data", "arithmetic", "--num-rollout", "1", "--rollout-max-response-len", "8192")


@cache
def preset_config(name: str) -> Config:
    """The configuration of a run with a preset and nothing else of its own."""
    loaded = load([*TABLE_RUN, "--model", name])
    return resolve(loaded.config, loaded.given)


def render_model_tables() -> str:
    """Two Markdown tables: the models, and their layouts."""
    presets = [(name, preset_config(name), _estimate(preset_config(name))) for name in preset_names()]
    presets.sort(key=lambda preset: (preset[2].parameters, preset[0]))
    models = "preset | checkpoint | parameters | active per token | layers | KV cache, bytes per token"
    layouts = (
        "preset | nodes of 8 | trainer: GPUs | layout | memory of a GPU, GiB | on the host, GiB | engine: GPUs "
        "| KV tokens"
    )
    of_models = _table(models, (_model_cells(*one) for one in presets))
    return f"{of_models}\n\n{_table(layouts, (_layout_cells(*one) for one in presets))}\n"


def _estimate(config: Config) -> RunEstimate:
    found = estimate_run(config, config.model.architecture)
    if found is None:
        raise ValueError(f"the preset {config.model.model} has an architecture that is not known; correct its file")
    return found


def _model_cells(name: str, config: Config, found: RunEstimate) -> Sequence[str]:
    shape = read_shape(config.model.architecture)
    layers = f"{shape.layers}, {sum(shape.sparse)} with {shape.experts} experts" if any(shape.sparse) else shape.layers
    return (
        f"`{name}`",
        f"[{config.train.hf_checkpoint}](https://huggingface.co/{config.train.hf_checkpoint})",
        f"{found.parameters:,}",
        f"{found.active:,}" if found.active != found.parameters else "all",
        str(layers),
        f"{shape.key_values * shape.layers * 2:,}",
    )


def _layout_cells(name: str, config: Config, found: RunEstimate) -> Sequence[str]:
    layout, trainer, engine = layout_of(config), found.trainer, found.engine
    nodes, each = config.parallel.actor_num_nodes, config.parallel.actor_num_gpus_per_node
    if trainer is None or engine is None:
        raise ValueError(f"the preset {name} has a layout that its layers do not divide into; correct its file")
    count = config.sglang.rollout_num_gpus or engine.gpus
    return (
        f"`{name}`",
        str(gpus_of(config).nodes),
        f"{nodes} x {each}" if nodes > 1 else str(each),
        str(layout),
        f"{trainer.total / 2**30:.0f}",
        f"{trainer.host / 2**30:.0f} per GPU" if trainer.host else "-",
        f"{count} ({engine.gpus} each)",
        f"{engine.kv_tokens // 1000:,}k",
    )


# The pages with generated tables.
PAGES: Final = {"configuration.md": render_tables, "models.md": render_model_tables}

if __name__ == "__main__":
    for name, render in PAGES.items():
        path = DOCS / name
        path.write_text(render_page(path.read_text(encoding="utf-8"), render()), encoding="utf-8")
