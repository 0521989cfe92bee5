"""Where the tensors of a checkpoint lie that Megatron-LM, or a program around it such as slime, has written.

    directory/latest_checkpointed_iteration.txt    the newest iteration, where several are kept
    directory/iter_0000040/.metadata               a pickle: names, shapes and places of all tensors
    directory/iter_0000040/__0_0.distcp            the tensors, which are read with `weights_only`
    directory/iter_0000040/common.pt               arguments and counters; never read here, for it is a pickle too

Invariant: reading `.metadata` runs no code. Whatever class or function the file names, an object of a new, empty class
takes its place, which keeps what it is given; a hostile file can make nothing but such objects.
"""

from __future__ import annotations

import pickle  # the only reader of one in the project; tests/test_architecture.py names it
from pathlib import Path
from typing import Any, Final

from models.disk import read_file
from models.errors import TrainStateUnreadable
from models.train.megatron.checkpoint_files import Chunk, Entry, Index

METADATA: Final = ".metadata"
NEWEST: Final = "latest_checkpointed_iteration.txt"


def iteration_of(directory: Path) -> Path | None:
    """The directory of the newest iteration in a checkpoint of Megatron-LM, or itself; None if it is none.

    Raises `TrainStateUnreadable` if the newest iteration has no tensors in the format torch_dist.
    """
    if (directory / METADATA).is_file():
        return directory
    if not (directory / NEWEST).is_file():
        return None
    newest = read_file(directory / NEWEST).decode(errors="replace").strip()
    place = directory / (f"iter_{int(newest):07d}" if newest.isdecimal() else "release")
    if not (place / METADATA).is_file():
        raise TrainStateUnreadable(
            f"{directory}/{NEWEST} says {newest[:40]!r}, and {place.name}/{METADATA} does not exist: the checkpoint is "
            "incomplete, or not in the format torch_dist; give another one, or save it with --ckpt-format torch_dist"
        )
    return place


def read_index(directory: Path) -> Index:
    """Of the tensors of one iteration. Raises `TrainStateUnreadable`."""
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Reader(file).load()
        places = {
            (key.fqn, tuple(getattr(key, "offset", ()))): (str(one.relative_path), int(one.offset), int(one.length))
            for key, one in metadata.storage_data.items()
        }
        index = {
            str(name): Entry(
                dtype=one.properties.state[0],
                shape=tuple(one.size),
                chunks=[
                    Chunk(tuple(part.offsets), tuple(part.sizes), *places[name, tuple(part.offsets)])
                    for part in one.chunks
                ],
            )
            for name, one in metadata.state_dict_metadata.items()
            if hasattr(one, "chunks")  # else it is an object of other programs, such as the scales of fp8
        }
        for file_name in {chunk.file for entry in index.values() for chunk in entry.chunks}:
            if Path(file_name).name != file_name or not (directory / file_name).is_file():
                raise ValueError(f"a tensor lies in {file_name!r}, which is no file of the directory")
    except Exception as error:  # a damaged pickle may raise anything
        raise TrainStateUnreadable(
            f"{path} is damaged, or of a format that is not known here ({type(error).__name__}: {error}); give another "
            "checkpoint"
        ) from error
    return index


class _Inert:
    """Takes the place of an object; keeps its attributes, and of a state that is none the value."""

    def __new__(cls, *_args: Any, **_options: Any) -> _Inert:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name.isidentifier() and name.islower():
            return name  # a dtype, which is a value; called as a function, it is an error
        return type(name, (_Inert,), {})
