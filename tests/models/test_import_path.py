"""Functions of the user, named by import path, where their modules have names of others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from models.import_path import ImportPathError, add_working_directory, import_path


def test_the_working_directory_is_searched_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = list(sys.path)
    add_working_directory()
    add_working_directory()
    assert sys.path == [*before, str(tmp_path)]
    (tmp_path / "mine_alone.py").write_text("def score(): return 1\n")
    assert import_path("mine_alone:score")() == 1


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


def test_elsewhere_the_error_speaks_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImportPathError, match="check the name, and that its directory is on PYTHONPATH"):
        import_path("models.rewards:score")
    with pytest.raises(ImportPathError, match="check the name after the colon"):
        import_path("models.import_path:score")
