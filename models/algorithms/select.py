"""Choosing a pure function by name or by import path: the seam through which algorithms are added.

A name is looked up, in this order:
1. in the caller's table of built-in functions;
2. if it contains a colon, as an import path `package.module:function`;
3. as a file of its own beside this one: `models/algorithms/<name>.py` with a function named after the kind
   (`advantages`, `policy_loss`, `kl`). Adding such a file is all that a new algorithm needs.

Invariant: nothing is imported before it is asked for, so that stages can choose an estimator without torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from configs.schema.did_you_mean import did_you_mean
from models.algorithms.errors import UnknownAlgorithm
from models.import_path import ImportPathError, import_path

F = TypeVar("F", bound=Callable[..., object])

PACKAGE = "models.algorithms"


def pick(kind: str, name: str, table: Mapping[str, F]) -> F:
    """The function called `name`, of the given kind. Raises `UnknownAlgorithm`."""
    if name in table:
        return table[name]
    path = name if ":" in name else f"{PACKAGE}.{name}:{kind}"
    if path != name and (not name.isidentifier() or importlib.util.find_spec(f"{PACKAGE}.{name}") is None):
        raise UnknownAlgorithm(
            f"{kind} {name!r} is unknown: choose one of {', '.join(sorted(table))} "
            f"or give an import path package.module:function{did_you_mean(name, table)}"
        )
    try:
        found = import_path(path)
    except ImportPathError as error:
        raise UnknownAlgorithm(f"{kind} {name!r}: {error}") from error
    if not callable(found):
        raise UnknownAlgorithm(f"{kind} {name!r}: {path!r} is no function; define it or correct the path")
    return cast(F, found)
