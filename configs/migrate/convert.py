"""`python launch.py convert run.sh`: the command of a launch script of slime, or of a configuration of verl, TRL or
prime-rl (`configs.migrate.other_projects`), for this project.

Prints the command, or with `--toml` a recipe, on stdout; and on stderr what changed and why. Flags behind the script
are added to the command, where they outrank the script's.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from configs.command_line import parse
from configs.layers import ConfigError, merge, value_at
from configs.load import layers_of, toml
from configs.migrate.other_projects import SUFFIXES, converted
from configs.migrate.shell_script import VERL_PROGRAMS, Launch, read_launch
from configs.slime_options import MODEL_ARGS
from configs.translate import Answer, Option, Translation, grouped, translate

USAGE: Final = (
    "usage: python launch.py convert FILE [--toml] [--json] [flags]\n\n"
    "Turns a launch script or configuration of slime, verl, TRL or prime-rl into a command of Sluice. Nothing of it is "
    "run.\n\n"
    "  FILE     a shell script that starts slime's train.py or train_async.py, or verl.trainer.main_ppo;\n"
    "           settings of verl or TRL as .yaml or .json; or an rl.toml of prime-rl\n"
    "  --toml   print a recipe for --config instead of a command\n"
    "  --json   print JSON: flags, text (command or recipe), notes\n"
    "  flags    are added to the command, for example --hf-checkpoint /models/Qwen3-4B --dry-run\n"
)

# What slime does where its script says nothing, and this project does otherwise: flag -> value.
_DEFAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "train-backend": ("megatron",),
    "adam-beta2": ("0.999",),
    "weight-decay": ("0.01",),
    "n-samples-per-prompt": ("1",),
}
_ROLLOUT_DEFAULTS: Final[Mapping[str, tuple[str, ...]]] = {"engine": ("sglang",), "no-partial-rollout": ()}
_EVALUATION: Final = re.compile(r"eval-|n-samples-per-eval-prompt|skip-eval")
_OWN_FUNCTIONS: Final = "slime's module names become stages.slime in your functions; see docs/slime.md:"


def main(argv: Sequence[str]) -> int:
    """The command; returns the exit code. Raises `ConfigError`."""
    if not argv or argv[0].startswith("-"):
        sys.stdout.write(USAGE)
        return 0 if "--help" in argv or "-h" in argv else 2
    script, flags = Path(argv[0]), [flag for flag in argv[1:] if flag not in ("--toml", "--json")]
    launch = None if script.suffix in SUFFIXES else read_launch(script)
    if launch is None or launch.program in VERL_PROGRAMS:
        command, notes = converted(script, None if launch is None else launch.arguments)
        notes += list(launch_notes(launch)) if launch is not None else []
    else:
        translation = translate(launch.arguments)
        added = list(defaults(launch, translation))
        command = [token for option in kept(translation) for token in option.argv]
        command += [token for flag in added for token in flag]
        notes = list(report(script, launch, translation, added))
    sys.stderr.writelines(f"{line}\n" for line in notes)
    text = recipe([*command, *flags]) if "--toml" in argv else shell_command([*command, *flags])
    if "--json" in argv:
        text = json.dumps({"flags": [*command, *flags], "text": text, "notes": notes}, indent=2) + "\n"
    sys.stdout.write(text)
    return 0


def kept(translation: Translation) -> Iterator[Option]:
    """All options but those that describe the model, which its config.json does, and those without effect."""
    left_out = MODEL_ARGS.union(without_effect(translation))
    return (option for option in translation.options if option.name not in left_out)


def without_effect(translation: Translation) -> Iterator[str]:
    """Options that slime leaves unread in silence, where a command of Sluice is refused."""
    given = {option.name: option.values for option in translation.options}
    if not {"eval-prompt-data", "eval-config"} & set(given):
        yield from filter(_EVALUATION.match, given)
    if given.get("tensor-model-parallel-size", ("1",)) == ("1",) and "sequence-parallel" in given:
        yield "sequence-parallel"
    if "update-weight-transport" not in given and "update-weight-buffer-size" in given:
        yield "update-weight-buffer-size"  # weights lie in shared memory


def defaults(launch: Launch, translation: Translation) -> Iterator[tuple[str, ...]]:
    """Flags for those defaults of slime that differ from ours."""
    given = {name: values for name, values, _ in grouped(launch.arguments)}
    supervised = ("--loss-type", "sft_loss") in {option.argv for option in translation.options}
    wanted = {**_DEFAULTS, **({} if supervised else _ROLLOUT_DEFAULTS)}
    if supervised:
        del wanted["n-samples-per-prompt"]
    elif "mode" not in given and ("--mode", "async") not in {option.argv for option in translation.options}:
        wanted |= {"mode": ("sync",)} if launch.program == "train.py" else {"async-buffer-size": ("1",)}
    if "use-kl-loss" in given and "kl-loss-type" not in given and "--use-kl-loss" in translation.argv:
        wanted["kl-loss-type"] = ("k1",)
    sizes = [values[0] for name, values in given.items() if name.startswith("actor-num-") and values]
    if "colocate" in given and not supervised and all(size.isdigit() for size in sizes):
        wanted["rollout-num-gpus"] = (str(math.prod(map(int, sizes))),)  # engines on all of the trainer's
    if given.get("actor-num-nodes", ("1",)) != ("1",):
        wanted["runner"] = ("ray",)
    if "use-dynamic-batch-size" not in given:
        wanted["no-use-dynamic-batch-size"] = ()
    if {"eval-prompt-data", "eval-config"} & set(given) and "eval-temperature" not in given:
        wanted["eval-temperature"] = given.get("rollout-temperature", ("1.0",))
    for name, values in wanted.items():
        if name.removeprefix("no-") not in given:
            yield (f"--{name}", *values)


def report(script: Path, launch: Launch, translation: Translation, added: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """What became of the script, a line for each kind of change."""
    options = translation.options
    yield f"{script}: {launch.program} with {len(options)} options"
    model = [option.name for option in options if option.name in MODEL_ARGS]
    if model:
        yield f"left out, for config.json of --hf-checkpoint says it: {_names(model)}"
    silent = [option.name for option in options if option.answer == Answer()]
    if silent:
        yield f"left out, for it is so anyway: {_names(silent)}"
    for option in options:
        if option.answer is not None and option.answer.argv and option.name not in MODEL_ARGS:
            yield f"changed: {shlex.join(option.tokens)} -> {shlex.join(option.argv)}"
    yield from (f"note: {note}" for note in (*translation.notes, *launch.notes))
    yield from (f"left out, not here: {fault.removesuffix('; leave it out')}" for fault in translation.faults)
    if added:
        yield f"added, for slime's defaults are others: {' '.join(shlex.join(flag) for flag in added)}"
    if rest := list(without_effect(translation)):
        yield f"left out, for it has no effect beside the other options: {_names(rest)}"
    own = [o.values[0] for o in options if o.name.endswith("-path") and o.argv and o.values]
    if own:
        yield f"{_OWN_FUNCTIONS} {' '.join(own)}"
    yield from launch_notes(launch)


def launch_notes(launch: Launch) -> Iterator[str]:
    """What of the script's own words was not certain."""
    if launch.conditional:
        yield (f"check {', '.join(launch.conditional)}: set under a condition; the last value in the script was taken")


def _names(names: Sequence[str]) -> str:
    return " ".join(f"--{name}" for name in dict.fromkeys(names))


def shell_command(argv: Sequence[str]) -> str:
    """`python launch.py` and its flags, one on each line. What a shell must put in stays open to it."""
    lines = ["python launch.py"]
    for _, _, tokens in grouped(argv):
        homes = [(token[:2] if token.startswith("~/") else "", token) for token in tokens]  # a shell's own, unquoted
        quoted = [f'"{token}"' if "$" in token else home + shlex.quote(token[len(home) :]) for home, token in homes]
        lines.append(f"    {' '.join(quoted)}")
    return " \\\n".join(lines) + "\n"


def recipe(argv: Sequence[str]) -> str:
    """The settings of a command line, and of recipes that it names, as TOML. Raises `ConfigError`."""
    if (unknown := next((token for token in argv if "$" in token), None)) is not None:
        raise ConfigError(f"{unknown!r} holds a variable of the shell, but a recipe has none; write its value there")
    loaded = merge(layers_of(parse(argv)))
    return toml({key: msgspec.to_builtins(value_at(loaded.config, key)) for key in loaded.given})
