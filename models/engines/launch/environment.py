"""The Python environment of SGLang and its router: its interpreter, and which versions and options are installed.

Invariants: this process imports nothing of the environment, a process of the environment describes it; the answer is
cached in the user's cache directory under everything that it depends on (interpreter, versions, change times, visible
GPUs), so that the seconds of SGLang's imports are paid once per installation and not once per run.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from configs.schema import SglangConfig
from models.disk import read_file, write_whole
from models.errors import EnvironmentBroken, EnvironmentMissing, LaunchError

Part = Literal["server", "router", "smg"]

PYTHON_VARIABLE: Final = "SLUICE_SGLANG_PYTHON"
SHIMS: Final = Path(__file__).resolve().parent / "shims"
CURE: Final = "run `make sglang-env`, or name another environment with --sglang-python"

_INSIDE: Final = Path(__file__).resolve().parent / "inside.py"
_PACKAGE: Final[Mapping[Part, str]] = {"server": "sglang", "router": "sglang-router", "smg": "smg"}
_VERSIONS_TIMEOUT_S: Final = 60.0
_OPTIONS_TIMEOUT_S: Final = 300.0  # the first import after an installation compiles thousands of files


class Option(Struct, frozen=True, kw_only=True):
    """One option of an SGLang or router command line. `names[0]` is the spelling to use."""

    names: tuple[str, ...]  # without dashes in front
    kind: Literal["flag", "switch", "value", "list", "append"]  # switch: has a no- form; append: may be repeated
    takes: Literal["int", "float", "size", "json", "text"] = "text"  # size: a whole number, or one like 64k
    choices: tuple[str, ...] = ()
    default: str | None = None
    help: str = ""


class Installed(Struct, frozen=True, kw_only=True):
    """Contents of one environment. Versions are None for missing packages; parts not requested have no options."""

    python: str
    python_version: str
    sglang: str | None = None
    torch: str | None = None
    router: str | None = None  # sglang-router
    smg: str | None = None
    cuda: bool = False  # whether torch of that environment sees a GPU; False if the server part was not requested
    options: dict[Part, tuple[Option, ...]] = {}

    def option(self, part: Part, name: str) -> Option | None:
        """The option of this name or alias (with dashes), or None."""
        return next((option for option in self.options.get(part, ()) if name in option.names), None)


class _Versions(Struct):
    """First answer of inside.py."""

    packages: dict[str, tuple[str, int]]
    python: str


class _Options(Struct):
    """Second answer of inside.py."""

    cuda: bool
    options: dict[Part, tuple[Option, ...]]


def find_python(config: SglangConfig, project_root: Path) -> Path:
    """The interpreter: --sglang-python, else $SLUICE_SGLANG_PYTHON, else .venv-sglang, else the one that runs this.

    A directory stands for the environment in it. Raises EnvironmentMissing if one that was named is not there.
    """
    for label, named in (("--sglang-python", config.sglang_python), (PYTHON_VARIABLE, os.environ.get(PYTHON_VARIABLE))):
        if named:
            given = Path(named).expanduser()
            python = given / "bin" / "python" if given.is_dir() else given
            if not os.access(python, os.X_OK) or python.is_dir():
                raise EnvironmentMissing(
                    f"{label} is {named!r}, but there is no Python interpreter; give an interpreter, or the directory "
                    "of a virtual environment, or leave it out and run `make sglang-env`"
                )
            return python.absolute()  # not resolved: the path of the link identifies a virtual environment
    own = project_root / ".venv-sglang" / "bin" / "python"
    return own.absolute() if own.exists() else Path(sys.executable)


def probe(python: Path, parts: Sequence[Part] = ("server", "router"), *, cache: Path | None = None) -> Installed:
    """Ask the environment for its versions and for the options of `parts`; a part that is absent has no options.

    Takes some 0.1 s if the answer is cached, else the time of SGLang's imports (5 to 15 s). `cache`: the directory of
    answers. Raises EnvironmentMissing if SGLang is requested and missing, EnvironmentBroken if an import fails.
    """
    found = msgspec.json.decode(_run(python, ["versions"], _VERSIONS_TIMEOUT_S), type=_Versions)
    if "server" in parts and "sglang" not in found.packages:
        raise EnvironmentMissing(f"SGLang is not installed in the environment of {python}; {CURE}")
    wanted = [part for part in _PACKAGE if part in parts and _PACKAGE[part] in found.packages]
    answers = _ask(python, {part: _place(cache, python, found, part) for part in wanted})
    versions = {name: version for name, (version, _) in found.packages.items()}
    return Installed(
        python=str(python),
        python_version=found.python,
        sglang=versions.get("sglang"),
        torch=versions.get("torch"),
        router=versions.get("sglang-router"),
        smg=versions.get("smg"),
        cuda="server" in answers and answers["server"].cuda,
        options={part: answer.options[part] for part, answer in answers.items()},
    )


def _ask(python: Path, places: Mapping[Part, Path]) -> dict[Part, _Options]:
    """The answer for each part: from its place in the cache, else from one process of that environment."""
    answers: dict[Part, _Options] = {}
    for part, place in places.items():
        with contextlib.suppress(OSError, msgspec.DecodeError):  # there is none that can be read
            answers[part] = msgspec.json.decode(read_file(place), type=_Options)
    missing = [part for part in places if part not in answers]
    if missing:
        described = msgspec.json.decode(_run(python, ["options", *missing], _OPTIONS_TIMEOUT_S), type=_Options)
        for part in missing:
            answers[part] = _Options(described.cuda, {part: described.options[part]})
            with contextlib.suppress(OSError):  # a cache that cannot be written costs seconds, not the run
                places[part].parent.mkdir(parents=True, exist_ok=True)
                write_whole(places[part], msgspec.json.encode(answers[part]))
    return answers


def _run(python: Path, arguments: Sequence[str], timeout_s: float) -> bytes:
    """Run inside.py under that interpreter; return its output."""
    # Without the path of this project, whose packages must not mix with the environment's. Bytecode is written once,
    # and read at every start.
    own = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    env = {**own, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    try:
        done = subprocess.run(
            [python, _INSIDE, *arguments], capture_output=True, timeout=timeout_s, env=env, check=False
        )
    except OSError as error:
        raise EnvironmentMissing(f"{python} cannot be run ({error.strerror}); {CURE}") from error
    except subprocess.TimeoutExpired as error:
        raise EnvironmentBroken(
            f"{python} did not import what it should within {timeout_s:g} s; look at what slows this machine, and try "
            "again"
        ) from error
    if done.returncode:
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        why = lines[-1] if lines else f"exit code {done.returncode}"
        raise EnvironmentBroken(
            f"the environment of {python} does not import: {why}; make it again with `make sglang-env`"
        )
    return done.stdout


def _place(cache: Path | None, python: Path, found: _Versions, part: Part) -> Path:
    """The file of one answer, named by everything that the answer depends on."""
    gpus = sorted([*glob.glob("/dev/nvidia[0-9]*"), *glob.glob("/dev/dxg")])
    packages = [found.packages.get(name) for name in dict.fromkeys((_PACKAGE[part], "torch"))]
    seen = (str(python), found.python, packages, part, gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    digest = hashlib.sha256(msgspec.json.encode(seen) + _INSIDE.read_bytes()).hexdigest()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (cache or base / "sluice" / "sglang") / f"{part}-{digest[:24]}.json"


# --------------------------------------------------------------------------------------------------
# Describes a new environment once, so that the first run does not wait for SGLang's imports.
#
#     .venv-sglang/bin/python -m models.engines.launch.environment .venv-sglang/bin/python
#
# It also finds out whether the installation imports at all. Exit code 1 with one sentence if not.


def main(argv: Sequence[str]) -> int:
    try:
        found = probe(find_python(SglangConfig(sglang_python=argv[0]), Path()))
    except LaunchError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    where = "GPU" if found.cuda else "CPU"
    sys.stdout.write(f"SGLang {found.sglang} ({where}, torch {found.torch}), sglang-router {found.router}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
