"""`launch.py eval`: a checkpoint answers the held-out sets alone, as it did in its run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from launching import SIMULATED_ENGINE, SMALL, importable, made_model, sevens, succeed_here

import launch as program
from models.checkpoint import Manifest, write_manifest
from pipeline.errors import UsageError
from pipeline.observe.evaluation import main, table
from pipeline.record.metrics import read_metrics


def evaluated(capsys: pytest.CaptureFixture[str], code: int, *command: str) -> str:
    """What `eval` prints on the standard output alone."""
    capsys.readouterr()
    assert program.main(["eval", *command]) == code
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_checkpoint_answers_as_it_did_in_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same tokens from the same weights, so every figure is the same to the bit, for both saved versions."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    flags = [*SMALL, *made_model(), *sevens(tmp_path), "--num-rollout", "4", "--save-interval", "2"]
    held = ["--eval-prompt-data", "held=arithmetic@[0:6]", "one=arithmetic@[6:9]", "--eval-temperature", "1"]
    own = ["--eval-interval", "2", "--eval-sets", '{"one": {"n_samples": 3, "max_response_len": 4}}']
    succeed_here(run, *flags, *held, *own, cwd=tmp_path)
    trained = {int(row["eval/version"]): row for row in read_metrics(run / "metrics.jsonl") if "eval/version" in row}
    with importable(tmp_path):
        for version, checkpoint in ((4, run), (2, run / "checkpoints" / "step-00000002")):
            place = tmp_path / f"alone-{version}"
            out = evaluated(capsys, 0, str(checkpoint), "--json", "--run-dir", str(place))
            found = json.loads(out)
            assert (found["checkpoint"], found["run"], found["complete"]) == (str(checkpoint), str(place), True)
            assert {name: values["prompts"] for name, values in found["sets"].items()} == {"held": 6, "one": 3}
            for name, values in found["sets"].items():
                assert type(values["prompts"]) is int
                assert values.pop("mean") == trained[version][f"eval/{name}"]
                assert {f"eval/{name}-{key.removeprefix('mean-')}": value for key, value in values.items()} == {
                    key: value for key, value in trained[version].items() if key.startswith(f"eval/{name}-")
                }
            assert "best@2" in found["sets"]["one"]
            assert "best@2" not in found["sets"]["held"]
    assert trained[2] != trained[4]


@pytest.mark.slow
def test_a_supervised_run_is_evaluated_with_the_settings_of_its_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--config", "sft", "--rollout-batch-size", "8", "--num-rollout", "2", "--no-live", "--no-use-plot"]
    succeed_here(tmp_path / "run", *flags, *made_model(), "--no-use-tensorboard")
    held = ["--eval-prompt-data", "arithmetic@[0:4]", "--run-dir", str(tmp_path / "alone")]
    found = json.loads(evaluated(capsys, 0, str(tmp_path / "run"), "--json", *held))
    assert found["sets"]["heldout"]["prompts"] == 4
    assert "pass@1" in found["sets"]["heldout"], "by the recipe's grader, which says what is correct"


@pytest.mark.slow
def test_a_model_is_evaluated_without_its_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe that trains and warms up gives its settings alone. Nothing is trained and no checkpoint is written."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input": f"{n}+{n}=", "label": str(2 * n)}) + "\n" for n in range(5)))
    flags = ["--config", "quickstart", *SIMULATED_ENGINE, "--eval-prompt-data", f"rows={rows}", "--runner", "inprocess"]
    flags += ["--prompt-data", str(tmp_path / "gone.jsonl")]
    place = tmp_path / "alone"
    out = evaluated(capsys, 0, made_model()[1], *flags, "--run-dir", str(place))
    estimates = ["set", "rows", "pass@1", "pass@2", "mean@2", "maj@2"]
    assert [line.split()[0] for line in out.splitlines() if line] == estimates
    assert not list((place / "checkpoints").iterdir())
    assert json.loads((place / "summary.json").read_text())["steps"] == 0
    assert 'train_backend = "simulated"' in (place / "config.toml").read_text(), "no trainer takes its memory"
    late = [*flags, "--eval-deadline-s", "0.01", "engine.simulated.a_ms=300"]
    out = evaluated(capsys, 1, made_model()[1], *late, "--run-dir", str(tmp_path / "late"))
    assert "incomplete: answers are missing" in out
    stopped = [*flags, "--deadline-s", "0.001"]
    assert "0.000" not in evaluated(capsys, 1, made_model()[1], *stopped, "--run-dir", str(tmp_path / "stopped"))


def test_the_table_has_a_line_for_each_estimate() -> None:
    bounds = {"mean-ci_low": 0.25, "mean-ci_high": 0.75, "pass@1": 0.4, "pass@1-ci_low": 0.3, "pass@1-ci_high": 0.5}
    found = {"complete": True, "sets": {"aime": {"mean": 0.5, "prompts": 30, "response_len": 7.0, **bounds}}}
    assert [line.split() for line in table(found).splitlines()[2:]] == [
        ["aime", "30", "mean", "0.500", "0.250", "..", "0.750"],
        ["pass@1", "0.400", "0.300", "..", "0.500"],
    ]


def test_what_cannot_be_evaluated_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(command: object) -> int:
        raise AssertionError(command)

    with pytest.raises(UsageError, match=r"--num-rollout, --eval-interval: eval trains nothing.*leave it out"):
        main(["tiny", "--num-rollout", "3", "--eval-interval", "1"], never)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    with pytest.raises(UsageError, match=r"the run has no checkpoint; set --save-interval, or give a model"):
        main([str(run), "--eval-prompt-data", "arithmetic"], never)
    step = run / "checkpoints" / "step-00000002"
    (step / "hf").mkdir(parents=True)
    (step / "hf" / "model.safetensors").write_bytes(b"right")
    write_manifest(step, Manifest(step=2, version=2, run_generation=0, ledger="{}", config_hash="", cursor=""))
    (step / "hf" / "model.safetensors").write_bytes(b"wrong")
    assert program.main(["eval", str(step), "--eval-prompt-data", "arithmetic"]) == 2
    assert "model.safetensors is damaged" in capsys.readouterr().err


def test_the_settings_of_the_run_lie_under_the_flags(tmp_path: Path) -> None:
    """A moved run directory, too: settings and weights are those that lie there."""
    step = tmp_path / "before" / "checkpoints" / "step-00000002"
    (step / "hf").mkdir(parents=True)
    write_manifest(step, Manifest(step=2, version=2, run_generation=0, ledger="{}", config_hash="", cursor=""))
    (tmp_path / "before" / "config.toml").write_text("")
    run = Path(shutil.move(tmp_path / "before", tmp_path / "after"))
    asked: list[list[str]] = []

    def keep(command: object) -> int:
        asked.append([*command])  # type: ignore[call-overload]
        return 3

    for place in (run, run / "checkpoints" / "step-00000002"):
        assert main([str(place), "--eval-top-p", "0.5", "--run-dir", "here"], keep) == 3
        found = asked.pop()
        assert found[:4] == [
            "--config",
            str(run / "config.toml"),
            "--hf-checkpoint",
            str(run / step.relative_to(tmp_path / "before") / "hf"),
        ]
        assert found.index("--eval-top-p") < found.index("--num-rollout")
        assert found[-2:] == ["--run-dir", "here"]
        assert found[found.index("--eval-deadline-s") + 1] == "604800"
    main([str(run), "--eval-deadline-s", "5"], keep)
    assert asked.pop().count("--eval-deadline-s") == 1
