"""From a command line, recipes and a model's preset to one configuration, and back to TOML and JSON.

Invariants: an unknown key is refused with the nearest known key; what `dump_toml` writes is read back equal; the hash
depends on what is trained and how, not on where the run writes or what it shows.

`--model qwen3-8b` lays `configs/models/qwen3-8b.toml` under the recipe: the model's dimensions, its checkpoint, and a
layout for one way to run it, with Megatron-core and SGLang. What a preset sets for a backend or an engine that the run
does not use, or for a size that a layer above changed, is dropped, so a preset alone never causes a contradiction.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from configs.command_line import RETIRED, Arguments, parse, retired
from configs.flags import TABLES, RefusedValue, flags, flags_by_key
from configs.layers import ConfigError, Layer, Loaded, merge, refusal, value_at
from configs.schema import Config
from configs.schema.notation import cure
from configs.schema.train import has_transformer_engine

MODELS: Final = Path(__file__).resolve().parent / "models"

# Section -> the key that says whether it is used, and the values with which it is.
_USED: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "parallel": ("train.train_backend", ("fsdp", "megatron")),
    "fsdp": ("train.train_backend", ("fsdp",)),
    "lora": ("train.train_backend", ("fsdp",)),
    "megatron": ("train.train_backend", ("megatron",)),
    "sglang": ("engine.engine", ("sglang",)),
}
_TENSOR: Final = "megatron.tensor_model_parallel_size"
_PIPELINE: Final = "megatron.pipeline_model_parallel_size"
_CHECKPOINTS: Final = ("train.hf_checkpoint", "train.ref_load", "critic.critic_load", "model.architecture")
_RECOMPUTE: Final = ("megatron.recompute_granularity", "megatron.recompute_activations")


def preset_names() -> tuple[str, ...]:
    """Names that `--model` knows."""
    return tuple(sorted(path.stem for path in MODELS.glob("*.toml")))


def chosen_preset(layers: Sequence[Layer]) -> str | None:
    """The name that the highest layer gives; layers from the lowest to the highest, which is the command line.

    None if that is a recipe with an architecture of its own, such as a run's config.toml: the preset is in it already.
    """
    for layer in reversed(layers):
        if "model.model" in layer.values:
            complete = layer is not layers[-1] and "model.architecture" in layer.values
            return None if complete else layer.values["model.model"]
    return None


def without_other_models(model: str, layers: Sequence[Layer]) -> list[Layer]:
    """The layers, from the lowest to the highest, without the checkpoints of other models than the chosen preset's.

    `--model` written over a recipe means that model, not the recipe's.
    """
    above = max(place for place, layer in enumerate(layers) if layer.values.get("model.model") == model)
    return [
        layer.without(_CHECKPOINTS) if place < above and layer.values.get("model.model") != model else layer
        for place, layer in enumerate(layers)
    ]


def fitted(preset: Layer, above: Sequence[Layer]) -> Layer:
    """The preset without what does not apply under the layers above it, lowest first."""
    written = {key: value for layer in above for key, value in layer.values.items()}
    final = {**preset.values, **written}
    unused = {
        section
        for section, (switch, used) in _USED.items()
        if final.get(switch, flags_by_key()[switch].default) not in used
    }
    return preset.without(
        {*_outranked(written, final), *(key for key in preset.values if key.partition(".")[0] in unused)}
    )


def _outranked(written: Mapping[str, Any], final: Mapping[str, Any]) -> Iterator[str]:
    """Keys that make sense only with a size or a choice that was changed above."""
    if final.get(_TENSOR, 1) == 1:
        yield "megatron.sequence_parallel"
    if not has_transformer_engine():
        yield "megatron.moe_grouped_gemm"
    if _PIPELINE in written:
        yield "megatron.virtual_pipeline_model_parallel_size"
        yield "megatron.decoder_first_pipeline_num_layers"
        yield "megatron.decoder_last_pipeline_num_layers"
    if any(key in written for key in _RECOMPUTE):
        yield from ("megatron.recompute_granularity", "megatron.recompute_method", "megatron.recompute_num_layers")
        yield "train.gradient_checkpointing"
    if "sglang.rollout_external_engine_addrs" in written:
        yield "sglang.rollout_num_gpus"
    if "engine" in written.get("run.scale", {}):
        yield "sglang.rollout_num_gpus"


RECIPES: Final = Path(__file__).resolve().parent / "recipes"
CONFIG_FILE: Final = "config.toml"  # in a run directory: the resolved configuration, read again by --resume
QUICKSTART: Final = "quickstart"
TOY: Final = "toy"
# Keys that say what is trained; a command line with none of them has a toy problem put under it.
_WORK: Final = ("data.prompt_data", "train.hf_checkpoint", "run.resume", "model.model")
# Beginnings of keys that say where a run writes, what it shows, or when it ends, not what is trained.
_NOT_HASHED: Final = (
    "observe.", "ray.", "debug.save_", "run.run_dir", "run.resume", "run.deadline_s", "run.drain_s", "run.max_restarts",
    "run.auto_resume", "run.stall_",
)  # fmt: skip


def load(argv: Sequence[str]) -> Loaded:
    """Parse a command line, read its recipes and its model's preset, merge them over the defaults.

    Raises `ConfigError`.
    """
    return load_arguments(parse(argv))


def load_arguments(arguments: Arguments) -> Loaded:
    """As `load`, for a command line that is already parsed. `--resume` reads the recipe in the run's directory."""
    layers = layers_of(arguments)
    model = chosen_preset(layers)
    if model is None:
        return merge(layers)
    layers = without_other_models(model, layers)
    return merge([fitted(read_preset(model), layers), *layers])


def with_work(arguments: Arguments) -> tuple[Arguments, str]:
    """Where neither data nor a model is named: the quickstart, or the toy problem under the recipes that are named.

    With it a sentence for the user, empty where nothing was put in. Raises `ConfigError`.
    """
    if any(key in layer.values for layer in layers_of(arguments) for key in _WORK):
        return arguments, ""
    if arguments.config:
        note = f"no --prompt-data, --model or --hf-checkpoint: {' '.join(arguments.config)} on the toy problem"
        return msgspec.structs.replace(arguments, config=(TOY, *arguments.config)), note
    note = f"no --prompt-data, --config, --model or --hf-checkpoint: running the recipe {QUICKSTART}"
    return msgspec.structs.replace(arguments, config=(QUICKSTART,)), note


def layers_of(arguments: Arguments) -> list[Layer]:
    """The recipes in their order, and the command line above them. Raises `ConfigError` that lists all their faults."""
    recipes = arguments.config
    resume = arguments.layer.values.get("run.resume")
    if not recipes and resume is not None:
        recipes = (str(Path(resume) / CONFIG_FILE),)
        if not Path(recipes[0]).is_file():
            raise ConfigError(
                f"{arguments.layer.labels['run.resume']} is {resume!r}, but a run to resume holds {CONFIG_FILE}, "
                "which is not there; give the directory that the run printed at its start"
            )
    read: list[Layer] = []
    faults: list[str] = []
    for name in recipes:
        try:
            layer = read_recipe(name)
            if recipe_path(name).name == CONFIG_FILE and "run.run_dir" in layer.values:
                # A run's own config.toml says what was run; where that was does not bind the next run that reads it.
                layer = layer.without(("run.run_dir", "run.resume"))
            read.append(layer)
        except ConfigError as error:
            faults.extend(error.faults)
    if faults:
        raise ConfigError(faults)
    return [*read, arguments.layer]


def recipe_names() -> tuple[str, ...]:
    """Names of the recipes that come with the project."""
    return tuple(sorted(path.stem for path in RECIPES.glob("*.toml")))


def recipe_path(name: str) -> Path:
    """The file of a recipe: a path, or the bare name of a built-in one. Raises `ConfigError`."""
    path = Path(name)
    if path.is_file():
        return path
    built_in = RECIPES / f"{path.name.removesuffix('.toml')}.toml"
    if path.parent == Path() and built_in.is_file():
        return built_in
    otherwise = f"choose a file, or one of {', '.join(recipe_names())}"
    hint = cure(path.name.removesuffix(".toml"), recipe_names(), otherwise, form="--config {}")
    raise ConfigError(f"--config is {name!r}, but there is no such file or recipe; {hint}")


def read_recipe(name: str) -> Layer:
    """Read a recipe into a layer. Raises `ConfigError` that lists every fault of the file."""
    return _read(recipe_path(name), recipe_path(name).name)


def read_preset(name: str) -> Layer:
    """Read the preset of a published model into a layer. Raises `ConfigError`."""
    if name not in preset_names():
        hint = cure(name.lower(), preset_names(), form="--model {}")
        raise ConfigError(f"--model is {name!r}, but there is no such preset; {hint}")
    return _read(MODELS / f"{name}.toml", f"--model {name}")


def _read(path: Path, file: str) -> Layer:
    """Typed values of the tables of a recipe, which faults call `file`. Raises `ConfigError` that lists every fault."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} is not valid TOML: {error}; correct that place") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); make it a file that you may read") from error
    values: dict[str, Any] = {}
    labels: dict[str, str] = {}
    faults: list[str] = []
    for key, value in _leaves(tables):
        flag = flags_by_key().get(key)
        label = f"{key} in {file}"
        if flag is None:
            if key not in RETIRED or RETIRED[key][0] != value:  # at its default: the config.toml of an older run
                faults.append(_unknown(key, value, file))
            continue
        try:
            values[key] = flag.from_value(value)
            labels[key] = label
        except RefusedValue as error:
            faults.append(refusal(flag, label, value, str(error)))
    if faults:
        raise ConfigError(faults)
    return Layer(values=values, labels=labels)


def _leaves(tables: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Dotted keys and values; a table that is itself a value (an object) stays whole."""
    for name, value in tables.items():
        key = f"{prefix}{name}"
        inner = any(known.startswith(f"{key}.") for known in flags_by_key())
        if isinstance(value, dict) and key not in flags_by_key() and inner:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _unknown(key: str, value: Any, file: str) -> str:
    if fault := retired(key):
        return f"{file}: {fault}"
    section, _, name = key.rpartition(".")
    home = next((flag.key for flag in flags() if flag.name and flag.key.rpartition(".")[2] == name), None)
    if any(known.startswith(f"{key}.") for known in flags_by_key()):
        return f"{key} in {file} is {value!r}, but must be a table; write [{key}] and its keys below"
    if home is not None:
        return f"{key} in {file} is no key, but {home} is; put {name} under [{home.rpartition('.')[0]}]"
    if isinstance(value, dict) and not section:
        sections = {known.partition(".")[0] for known in flags_by_key()}
        hint = cure(name, sections, "see docs/configuration.md for the sections", form="[{}]")
        return f"[{key}] in {file} is no section; {hint}"
    hint = cure(key, flags_by_key(), "see docs/configuration.md for the keys")
    return f"{key} in {file} is no key of the configuration; {hint}"


def config_hash(config: Config) -> str:
    """16 hexadecimal digits that are equal for equal experiments."""
    import hashlib

    kept = {flag.key: _plain(config, flag.key) for flag in flags() if not flag.key.startswith(_NOT_HASHED)}
    return hashlib.sha256(msgspec.json.encode(kept, order="deterministic")).hexdigest()[:16]


def _plain(config: Config, key: str) -> Any:
    return msgspec.to_builtins(value_at(config, key))


def dump_toml(config: Config) -> str:
    """The configuration as a recipe."""
    return toml({flag.key: _plain(config, flag.key) for flag in flags()})


def toml(values: Mapping[str, Any]) -> str:
    """Values under dotted keys. Those that are none are left out, for TOML has no null; lists of tables come last."""
    tables: dict[str, list[str]] = {}
    for key, value in values.items():
        if key not in TABLES and value is not None:
            table, _, name = key.rpartition(".")
            tables.setdefault(f"[{table}]", []).append(f"{name} = {_toml_value(value)}")
    parts = list(tables.items())
    for section in TABLES:
        for fields in values.get(section, ()):
            lines = [f"{name} = {_toml_value(value)}" for name, value in fields.items() if value is not None]
            parts.append((f"[[{section}]]", lines))
    return "\n\n".join("\n".join([head, *lines]) for head, lines in parts) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        pairs = ", ".join(f"{_toml_value(key)} = {_toml_value(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return repr(value)
