"""The tables of docs/models.md: what each preset is, and what its layout is estimated to need.

Invariant: made from the presets and the estimates alone. `python -m configs.plan.model_table` writes them into the
page.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from configs.help import with_tables
from configs.load import load
from configs.plan.gpus import gpus_of, layout_of
from configs.plan.run_estimate import RunEstimate, estimate_run
from configs.presets import preset_names
from configs.resolve import resolve
from configs.schema import Config
from configs.schema.model_shapes import ModelShape, known_shape

PAGE: Final = Path(__file__).resolve().parent.parent.parent / "docs" / "models.md"
# The run that the tables are about.
RUN: Final = ("--prompt-data", "arithmetic", "--num-rollout", "1", "--rollout-max-response-len", "8192")


@cache
def preset_config(name: str) -> Config:
    """The configuration of a run with a preset and nothing else of its own."""
    loaded = load([*RUN, "--model", name])
    return resolve(loaded.config, loaded.given)


def render_tables() -> str:
    """Two Markdown tables: the models, and their layouts."""
    models = ["| preset | checkpoint | parameters | active per token | layers | KV cache, bytes per token |"]
    models.append("|---|---|---|---|---|---|")
    layouts = [
        "| preset | nodes of 8 | trainer: GPUs | layout | memory of a GPU, GiB | on the host, GiB | engine: GPUs "
        "| KV tokens |"
    ]
    layouts.append("|---|---|---|---|---|---|---|---|")
    for name in sorted(preset_names(), key=_size):
        config = preset_config(name)
        shape, found = _known(config)
        models.append(_row(_model_cells(name, config, shape, found)))
        layouts.append(_row(_layout_cells(name, config, found)))
    return "\n".join(models) + "\n\n" + "\n".join(layouts) + "\n"


def render_page(page: str) -> str:
    """The page with its tables made anew. Raises ValueError if it lacks the two marks."""
    return with_tables(page, "configs.plan.model_table", render_tables())


def _size(name: str) -> tuple[int, str]:
    return _known(preset_config(name))[1].parameters, name


def _known(config: Config) -> tuple[ModelShape, RunEstimate]:
    shape = known_shape(config.model.architecture)
    found = estimate_run(config, config.model.architecture)
    if shape is None or found is None:
        raise ValueError(f"the preset {config.model.model} has an architecture that is not known; correct its file")
    return shape, found


def _model_cells(name: str, config: Config, shape: ModelShape, found: RunEstimate) -> Sequence[str]:
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


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
