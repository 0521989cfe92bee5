"""A command line, settled as `launch.py` does; its faults and warnings; and values for every flag.

A command line is given in pieces, each of which is split into words as a shell does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from configs.flags import Flag, flags
from configs.layers import ConfigError
from configs.load import Loaded, load
from configs.resolve import resolve
from configs.rules.validate import checked
from configs.schema import Config

WORK = "--prompt-data arithmetic --num-rollout 3"
BASE = f"{WORK} --hf-checkpoint tiny-arithmetic"


def recipe(folder: Path, text: str, name: str = "mine.toml") -> str:
    """Write a recipe, and say where it is."""
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def read(*argv: str) -> Loaded:
    return load([word for text in argv for word in shlex.split(text)])


def resolved(*argv: str) -> Config:
    loaded = read(*argv)
    return resolve(loaded.config, loaded.given)


def planned(*argv: str) -> Config:
    """Of a run of ten batches whose model is given, or none."""
    return resolved("--prompt-data arithmetic --num-rollout 10", *argv)


def settled(*argv: str) -> tuple[Config, tuple[str, ...]]:
    """The configuration and its warnings. Raises `ConfigError`."""
    loaded = read(*argv)
    return checked(loaded.config, loaded.given)


def faults_of(*argv: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        settled(*argv)
    return caught.value.faults


def warnings_of(*argv: str) -> tuple[str, ...]:
    return settled(*argv)[1]


def one_says(words: str, sentences: Sequence[str]) -> None:
    """Of faults or warnings."""
    assert any(words in sentence for sentence in sentences), sentences


NAMED = [flag for flag in flags() if flag.name is not None]
NESTED = [flag for flag in flags() if flag.name is None and flag.kind != "tables"]
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12).filter(
    lambda text: not text.startswith("-") and text not in ("none", "true", "false") and "=" not in text
)


def values(flag: Flag) -> st.SearchStrategy[Any]:
    """Valid values of a flag, from the bounds in its rule."""
    if flag.choices:
        return st.sampled_from(flag.choices)
    if flag.kind == "bool":
        return st.booleans()
    if flag.kind == "map":
        return st.dictionaries(st.sampled_from(["reward", "generate", "tools"]), st.integers(1, 9), min_size=1)
    if flag.kind == "json":
        return st.dictionaries(WORDS, st.one_of(st.booleans(), st.integers(-9, 9), WORDS), max_size=3)
    if flag.kind == "list":
        numbers = st.floats(1e-3, 1e3) if "numbers" in flag.rule else WORDS
        item = st.integers(0, 10**6) if "whole" in flag.rule else numbers
        return st.lists(item, min_size=1, max_size=3).map(tuple)
    low = re.search(r"(>=?) (-?[\d.]+)", flag.rule)
    high = re.search(r"(<=?) ([\d.]+)", flag.rule)
    if "whole" in flag.rule:
        return st.integers(int(low[2]) if low else -(10**6), int(high[2]) if high else 10**6)
    if "number" in flag.rule:
        return st.floats(
            float(low[2]) if low else -1e6,
            float(high[2]) if high else 1e6,
            exclude_min=bool(low and low[1] == ">"),
            exclude_max=bool(high and high[1] == "<"),
            allow_nan=False,
        )
    return WORDS
