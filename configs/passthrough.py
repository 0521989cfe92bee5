"""Flags that are no fields of the schema: `--sglang-<option>`, `--router-<option>` and `--megatron-<option>`, which are
passed on by name, and settings of earlier versions, which get one sentence.

Invariants: a flag of the schema always wins; a name that is nearly one of them is a slip, not an option; whether the
installed program knows an option and takes its value is checked with that program (`pipeline.preflight.refusals`,
`models.train.megatron.options`), not here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from configs.schema.notation import nearest

# Settings of earlier versions: key -> (the default it had, what to do instead).
RETIRED: Final[Mapping[str, tuple[object, str]]] = {
    "run.hub_processes": (0, "all streams run in the controller's process"),
    "run.hub_shards": (1, "all streams run in the controller's process"),
    "data.strict_data": (False, "--max-bad-rows 0 says the same"),
    "run.train_standby": (False, "a killed trainer starts again from its last checkpoint; see --save-interval"),
}


def retired(key: str) -> str | None:
    """What to do instead of a setting of an earlier version, by its key or its flag's name; None for all others."""
    plain = key.replace("-", "_").removeprefix("no_")
    found = (instead for name, (_, instead) in RETIRED.items() if plain in (name, name.partition(".")[2]))
    return next((f"{key} was removed: {instead}; leave it out" for instead in found), None)


_OWNERS: Final[Mapping[str, str]] = {
    "sglang-": "sglang.sglang_args",
    "router-": "router.router_args",
    "megatron-": "megatron.megatron_args",
}
_SLIP: Final = 0.85  # likeness above which a name is a slip of one of our flags
# Options of the router that may be given several times, each with a URL and perhaps a port.
_REPEATED: Final = {"prefill", "decode", "encode"}


def option_of(name: str, known: Iterable[str]) -> tuple[str, str, str | None] | None:
    """`sglang-mem-fraction-static` -> (`sglang.sglang_args`, `mem_fraction_static`, None).

    The third part is a fault, if the name cannot be passed on. None if the name has none of the prefixes. `known`: the
    names of our own flags, of which `name` is none.
    """
    plain = name.replace("_", "-")
    negative = plain.startswith("no-")
    plain = plain.removeprefix("no-")
    prefix = next((start for start in _OWNERS if plain.startswith(start) and plain != start), None)
    if prefix is None:
        return None
    near = nearest(plain, [flag for flag in known if flag.startswith(prefix)], _SLIP)
    option = plain.removeprefix(prefix)
    key, field = _OWNERS[prefix], option.removeprefix("no-").replace("-", "_")
    fault = None
    if near:
        fault = f"--{name} is no flag; did you mean --{near}?"
    elif negative or option.startswith("no-"):
        fault = (
            f"--{name} turns an option off, but only what is given is passed on; leave it out, or write "
            f"{key}.{field}=false"
        )
    elif "_" in name:
        fault = f"--{name} is no flag, for names are written with dashes; write --{plain}"
    return key, field, fault


def option_value(key: str, option: str, texts: list[str], before: Any) -> Any:
    """True without a value, else the text, else the list of texts. `before`: what an earlier giving of it left."""
    if option in _REPEATED and key == _OWNERS["router-"]:
        return [*(before or []), " ".join(texts)]
    return True if not texts else texts[0] if len(texts) == 1 else texts
