"""Flags that are not ours: `--sglang-<option>` and `--router-<option>`, passed on to the server and to the router.

Invariants: a flag of the schema always wins; what is nearly one of them is taken for a slip, not for an option; whether
the installed program knows an option, and takes the value, is asked of that program (`pipeline.sglang`), not here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

__all__ = ["ALIASES", "option_of", "option_value"]

# Other names of our own flags, as other programs call them.
ALIASES: Final[Mapping[str, str]] = {"sglang-server-concurrency": "server-concurrency"}

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

    The third part is a fault, if the name cannot be passed on. None if the name has neither prefix. `known`: the names
    of our own flags, of which `name` is none.
    """
    import difflib

    plain = name.replace("_", "-")
    negative = plain.startswith("no-")
    plain = plain.removeprefix("no-")
    prefix = next((start for start in _OWNERS if plain.startswith(start) and plain != start), None)
    if prefix is None:
        return None
    near = difflib.get_close_matches(plain, [flag for flag in known if flag.startswith(prefix)], n=1, cutoff=_SLIP)
    option = plain.removeprefix(prefix)
    key, field = _OWNERS[prefix], option.removeprefix("no-").replace("-", "_")
    fault = None
    if near:
        fault = f"--{name} is no flag; did you mean --{near[0]}?"
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
