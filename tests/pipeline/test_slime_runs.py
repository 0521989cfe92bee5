"""Whole runs with user code from the page docs/slime.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launching import NO_DATA, ROOT, SIMULATED, made_model, succeed_here

import launch as program
from stages.train.saved_groups import load_batch

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "slime.md"


def write_code(directory: Path) -> None:
    """The files of the page, `# my_project/name.py` at the top of each, in a package of their own."""
    found = re.findall(r"```python\n# my_project/(\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    (directory / "my_project").mkdir()
    for name, code in found:
        (directory / "my_project" / f"{name}.py").write_text(code)


def test_a_data_source_gives_each_prompt_once_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_code(tmp_path)
    batches = str(tmp_path / "{rollout_id}")
    done = succeed_here(
        tmp_path / "run", *NO_DATA, *made_model(), *SIMULATED, "--data-source-path", "my_project.sums.Sums",
        "--save-debug-rollout-data", batches, cwd=tmp_path,
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert program.main(["--resume", str(done.run_dir), "--num-rollout", "8"]) == 0
    rows = [group.group for step in range(8) for group in load_batch(batches, step)]
    numbers = [json.loads(row.metadata)["n"] for row in rows]
    assert len(set(numbers)) == len(numbers) == 32
    assert max(numbers) < 8 * 4 + 3 * 4, "nothing was passed over: what was asked ahead comes first"
    for row, n in zip(rows, numbers, strict=True):
        a, b = divmod(n, 90)
        assert (row.prompt, row.label) == (f"{a + 10}+{b + 10}=", str(a + b + 20))


def test_a_rollout_function_makes_the_batches_of_a_run_and_a_function_logs_them(tmp_path: Path) -> None:
    write_code(tmp_path)
    done = succeed_here(
        tmp_path / "run", *NO_DATA, *made_model(), *SIMULATED, "--prompt-data", "arithmetic", "--num-rollout", "3",
        "--rollout-function-path", "my_project.batches.generate_rollout",
        "--custom-rollout-log-function-path", "my_project.tracker.log_batch", cwd=tmp_path,
    )  # fmt: skip
    groups = done.summary["groups"]
    assert (groups["trained"], groups["failed"]) == (12, 0)
    rows = [json.loads(line) for line in (done.run_dir / "metrics.jsonl").read_text().splitlines()]
    counted = [row["rollout_function/groups"] for row in rows if "rollout_function/groups" in row]
    assert len(counted) == 3
    assert all(1 <= number <= 4 for number in counted)
    assert [line.partition(":")[0] for line in (tmp_path / "best.txt").read_text().splitlines()] == ["0", "1", "2"]
