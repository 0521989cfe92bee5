"""A run, and its resume, in which no process can unpickle anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import SMALL, finish, made_model, start, succeed

pytestmark = pytest.mark.slow

# Python runs it at its start, before any module has taken hold of what is replaced here.
POISON = """
import os, pickle, sys, traceback

def note(kind):
    with open(os.environ["POISON_NOTES"], "a") as notes:
        notes.write(f"{kind} {' '.join(sys.orig_argv[1:])}\\n")

def refuse(*args, **kwargs):
    traceback.print_stack()
    note("refused")
    raise RuntimeError("something was unpickled")

class Unpickler(pickle.Unpickler):
    load = refuse

pickle.load = pickle.loads = pickle._load = pickle._loads = refuse
pickle.Unpickler = pickle._Unpickler = Unpickler
note("poisoned")
"""


def test_nothing_is_unpickled_in_any_process_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(POISON)
    notes = tmp_path / "notes"
    env = {"PYTHONPATH": str(tmp_path), "POISON_NOTES": str(notes)}
    succeed(tmp_path / "run", *SMALL, *made_model(), "--num-rollout", "2", "--save-interval", "2", **env)
    resume = ["--resume", str(tmp_path / "run"), "--runner", "local", "--num-rollout", "6"]
    done = finish(start(None, *resume, **env), tmp_path / "run")
    assert done.code == 0, done.err[-2000:]
    said = notes.read_text()
    assert all(name in said for name in ("launch.py", "models.engines.serve", "train-0", "generate-0", "reward-0"))
    assert [line for line in said.splitlines() if line.startswith("refused")] == []
