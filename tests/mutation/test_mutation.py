"""A mutant is found again after its function has moved."""

from __future__ import annotations

from pathlib import Path

from tests.mutation.mutants import Site, all_sites, find_again

BEFORE = '''
LIMIT: int = 3


class Queue:
    def put(self, size: int, *, force: bool = False) -> bool:
        """Take a job, if there is room."""
        if size > self.room and not force:
            raise ValueError(f"no room for {size}")
        self.room -= size
        return max(size, 1) >= 1
'''
MOVED = '''
from stages.limits import LIMIT

"""The jobs."""


class Queue:
    def other(self):
        self.room -= size


    def put(self, size, *, force=False):
        # Reworded, and laid out anew.
        if (size > self.room
                and not force):
            raise ValueError("The queue is full: " + str(size))
        self.room -= size
        return max(size, 1) >= 1
'''


def sites(root: Path, **files: str) -> list[Site]:
    for name, text in files.items():
        path = root / "stages" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return all_sites(root)[0]


def found(before: list[Site], after: list[Site]) -> dict[str, tuple[Site | None, str]]:
    mutants = {f"{site.mutant.operator} {site.new.strip()}": site.mutant for site in before}
    return {name: (site, how) for name, site, how in find_again(mutants, after)}


def test_a_mutant_is_found_again_after_its_function_has_moved(tmp_path: Path) -> None:
    before = sites(tmp_path / "before", queue=BEFORE)
    after = found(before, sites(tmp_path / "after", jobs=MOVED, limits="LIMIT = 3\n"))
    assert {name: how for name, (_, how) in after.items() if how != "exact"} == {}
    site = after["compare >="][0]
    assert site is not None
    assert site.mutant.file == "stages/jobs.py"
    assert site.apply(MOVED.encode()).decode() == MOVED.replace("size > self.room", "size >= self.room")


def test_a_renamed_one_is_found_by_its_form_and_a_removed_one_is_gone(tmp_path: Path) -> None:
    before = sites(tmp_path / "before", queue=BEFORE)
    renamed = BEFORE.replace("room", "space").replace("return max(size, 1) >= 1", "return True")
    after = found(before, sites(tmp_path / "after", queue=renamed))
    assert after["boolean or"][1] == "renamed"
    assert after["min-max min"] == (None, "gone")
