"""Sluice from Python, and the command `sluice`.

    import sluice

    config = sluice.load_config("--mode", "async", "--num-rollout", "20")  # the flags of `sluice --help`
    run_dir = sluice.run(config)
    sluice.report(run_dir)  # in a notebook: the page of the run, inline

Importing this package makes the names of Sluice's packages (OWN) mean these packages, whatever the working directory or
PYTHONPATH holds under the same names. A module of another project that was imported before under one of them is an
ImportError that names its file.
"""

from __future__ import annotations

import contextlib
import html
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from configs.schema import Config

__all__ = ["Report", "load_config", "main", "report", "run"]

OWN: Final = ("configs", "launch", "models", "pipeline", "stages", "transport")
ROOT: Final = next(  # the checkout, or the folder of installed packages
    place
    for place in Path(__file__).resolve().parents
    if (place / "launch.py").exists() and (place / "stages").exists()
)


class OwnPackages(MetaPathFinder):
    """Finds the packages of Sluice where this one is installed, before the working directory is searched."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(ROOT)], target) if fullname in OWN else None


def _check_shadows() -> None:
    """Raises ImportError if a name of Sluice's packages already means something else."""
    for name in OWN:
        module = sys.modules.get(name)
        places = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
        known = [place for place in places if place]
        if known and not any(Path(place).resolve().is_relative_to(ROOT) for place in known):
            raise ImportError(
                f"{name!r} was imported from {known[0]}, but Sluice has a package of this name in {ROOT}; "
                "import sluice first, or give yours another name"
            )


_check_shadows()
sys.meta_path.insert(0, OwnPackages())


def load_config(*flags: str) -> Config:
    """The resolved and checked configuration of a command line. Raises ConfigError with one sentence for each fault."""
    from launch import load_config

    return load_config(flags)


def run(config: Config) -> Path:
    """Run to the end in a process of its own, with its output printed here; return the run directory.

    An interrupt (Ctrl-C, a notebook's stop) lets the run finish its groups in flight; a second
    interrupt ends it at once.
    Raises RuntimeError if the run fails.
    """
    from configs.load import dump_toml

    directory = Path(config.run.resume or config.run.run_dir or time.strftime("runs/%Y%m%d-%H%M%S"))
    with tempfile.TemporaryDirectory(prefix="sluice-") as home:
        file = Path(home, "config.toml")
        file.write_text(dump_toml(config), encoding="utf-8")
        place = "--resume" if config.run.resume else "--run-dir"
        command = [sys.executable, str(ROOT / "launch.py"), "--config", str(file), place, str(directory)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            assert process.stdout is not None
            while process.poll() is None:
                try:
                    for line in process.stdout:
                        sys.stdout.write(line)
                    process.wait()
                except KeyboardInterrupt:
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(signal.SIGINT)
    if process.returncode:
        raise RuntimeError(f"the run in {directory} ended with exit code {process.returncode}; its output says why")
    return directory


@dataclass(frozen=True)
class Report:
    """The page of a run as one HTML document, which a notebook shows `height` pixels high."""

    html: str
    height: int

    def _repr_html_(self) -> str:
        """In a frame of its own, which can reach neither the notebook nor the network."""
        text = html.escape(self.html)
        return (
            f'<iframe title="run" sandbox="allow-scripts" width="100%" height="{self.height}" srcdoc="{text}"></iframe>'
        )


def report(run_dir: Path | str, height: int = 800) -> Report:
    """What `launch.py report` writes, of a run that goes on or has ended. Raises UsageError where there is no run."""
    from pipeline.view.documents import RunDocuments
    from pipeline.view.html_report import documents
    from pipeline.view.html_report import html as page

    return Report(page(documents(RunDocuments(Path(run_dir)))), height)


def main() -> int:
    """The command `sluice`: the same as `python launch.py`."""
    from launch import main

    return main(program=True)
