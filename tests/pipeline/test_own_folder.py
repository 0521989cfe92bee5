"""A project of one's own: its functions are found in its folder, and its names do not get in the way of Sluice's.

No test here touches `sys.path` or PYTHONPATH: what is found is found as by a user.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from launching import NO_DATA, ROOT, SIMULATED, SMALL, made_model

from models.import_path import ImportPathError, import_path
from pipeline.facts.run_log import command

API = ROOT / "pipeline" / "api"
BARE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
CODE = """
def score(response, label, metadata):
    return float(len(response) % 2)

def clip(sample, reward):
    return reward
"""
ENVIRONMENT = """
from stages.agents.environment import Start, Step
from stages.chat.messages import Message

class Echo:
    async def reset(self, task):
        return Start((Message("user", "Say something."),))

    async def step(self, turn):
        return Step(reward=float(len(turn.text) % 2), done=True)

    async def close(self):
        pass

    @classmethod
    def tasks(cls, split, seed):
        while True:
            yield {"label": "1"}
"""


def test_commands_are_shown_as_they_can_be_typed_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert command("../a b/launch.py") == "python '../a b/launch.py'"
    assert command("/my/train.py") == "python launch.py", "the package is used by a program of the user's"
    (tmp_path / "sluice").touch(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    assert command(f"{tmp_path}/sluice") == f"{tmp_path}/sluice"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command(f"{tmp_path}/sluice") == "sluice"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder whose `models/`, `configs/`, `launch.py` and `queue.py` would break whatever imported them."""
    home = tmp_path / "project"
    for name in ("models/__init__.py", "configs/__init__.py", "launch.py", "queue.py"):
        file = home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise RuntimeError('this is not for Sluice')\n")
    (home / "my_code.py").write_text(CODE)
    (home / "my_environment.py").write_text(ENVIRONMENT)
    return home


def run(project: Path, *command: object) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=project, env=BARE, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_all_processes_find_what_is_in_the_folder(project: Path) -> None:
    """The environment has rewards of its own; the function grades the other rows, in a process for it."""
    (project / "echo.toml").write_text('[[environment]]\nname = "echo"\npath = "my_environment:Echo"\n')
    flags = [*NO_DATA, "--config", "echo.toml", "--prompt-data", "echo@[0:1]", "arithmetic@[0:1]", "--run-dir", "run"]
    flags += ["--custom-rm-path", "my_code:score", "--reward-workers", "1", "--rm-type", "auto"]
    shown = run(project, sys.executable, ROOT / "launch.py", *flags, *made_model(), *SIMULATED)
    assert f"python {ROOT}/launch.py samples {project}/run\n" in shown, "launch.py is not in this folder"
    summary = json.loads((project / "run" / "summary.json").read_text())
    assert (summary["groups"]["trained"], summary["groups"]["failed"]) == (16, 0)
    assert "env/echo/turns" in (project / "run" / "metrics.jsonl").read_text()


def test_another_module_of_the_same_name_is_named(project: Path) -> None:
    (project / "models" / "__init__.py").write_text("")
    code = f"import sys; sys.path.append({str(API)!r}); import models, sluice"
    done = subprocess.run([sys.executable, "-c", code], cwd=project, env=BARE, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"'models' was imported from {project / 'models' / '__init__.py'}, but Sluice has a package" in done.stderr


@pytest.mark.full
def test_a_wheel_in_an_environment_of_its_own(project: Path, tmp_path: Path) -> None:
    """The command and the package, beside the libraries that are installed here."""
    source, environment = tmp_path / "source", tmp_path / "environment"
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in files.stdout.splitlines():
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(project, *pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source)
    run(project, sys.executable, "-P", "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    wheel = next(tmp_path.glob("sluice-*.whl"))
    run(project, *pip, "--python", python, "install", "-q", "--no-deps", wheel)
    site = run(project, python, "-P", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")

    flags = [*SMALL, "--custom-rm-path", "my_code:score"]
    run(project, environment / "bin" / "sluice", *flags, "--run-dir", "by-command")
    code = f"import sluice; print(sluice.run(sluice.load_config(*{[*flags, '--run-dir', 'by-package']!r})))"
    (project / "queue.py").unlink()  # `python -c` puts the folder first, before the standard library
    assert run(project, python, "-c", code).splitlines()[-1] == "by-package"
    (tmp_path / "empty").mkdir()
    quickstart = "--mode async --num-rollout 2 --warm-start-steps 2 --rm-type random:0.5 --no-live --run-dir quick"
    run(tmp_path / "empty", environment / "bin" / "sluice", *quickstart.split())
    assert (tmp_path / "empty" / "quick" / "summary.json").is_file()


# Functions of the user, named by import path, where their modules have names of others.


@pytest.mark.parametrize("place", ["models/rewards.py", "models.py"])
@pytest.mark.parametrize("path", ["models.rewards:score", "models:score"])
def test_a_module_of_the_user_that_has_the_name_of_ours_is_named(
    place: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / place
    file.parent.mkdir(exist_ok=True)
    file.write_text("def score(): return 1\n")
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / Path(place).parts[0]
    with pytest.raises(ImportPathError, match=f"'models' is .*which your own {theirs} does not replace; give yours"):
        import_path(path)
