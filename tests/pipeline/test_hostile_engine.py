"""One engine that works beside one that lies in every way: the run finishes, and nothing of the lies is trained.

A lie is known by the log-prob of its tokens. By hand, for as long as you like (docs/engines.md):

    PYTHONPATH=tests/pipeline python -m tests.pipeline.test_hostile_engine runs/hostile 300
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from launching import SIMULATED_TRAINER, SMALL, Finished, here, made_model

import launch as program
from configs.schema.rollout import EngineConfig, SimulatedEngineConfig
from pipeline.record.journal import Ended, audit, read_journal
from stages.sampling import routes
from stages.train.saved_groups import read_file
from tests.hostile_engine import LIES, MARK, NOISE, Liar, SpoiltEngine, serving

BATCHES = 8
REQUEST_S = 1.5  # an answer that drips or never comes costs this
# What each kind of answer is refused with, in the log and as the reason of what it fails.
REASONS = {
    "longer": "new tokens, and 6 were allowed",
    "fewer log-probs": "are of other tokens than its output_ids",
    "nan": "has the log-prob None; it must be finite and at most 0",
    "no log-prob": "has the log-prob None; it must be finite and at most 0",
    "impossible log-prob": "has the log-prob 2.0; it must be finite and at most 0",
    "beyond the vocabulary": "holds token 1048576, outside the vocabulary",
    "negative": "holds token -3",
    "beyond 32 bits": "holds token 4294967301",
    "future": "are newer than any that were published",
    "another run": "are of another run",
    "no version": "is not of the form generation.version",
    "gap": "the spans of versions end at token 2 of 3",
    "nested": "maximum recursion depth exceeded",
    "endless": "without an end of line",
    "endless events": "and no end",
    "silent": "gave no answer within",
}
# Of requests that are lost or refused, not of answers; "past" is told as one of two, by how many versions there are.
OTHERS = ("broke the protocol", "cannot be reached", "refused the call with 404", "are older than")


def reasons(run_dir: Path) -> Counter[str]:
    """Why groups failed: each of the reasons of their members."""
    ended = [event for event in read_journal(run_dir / "ledger.jsonl") if isinstance(event, Ended)]
    details = [event.detail for event in ended if event.outcome == "failed"]
    return Counter(re.sub(r"http://\S+|response '\S+'", "_", detail) for detail in details)


def check(run_dir: Path, trained: Path) -> None:
    """Batches were trained, and no token of them is a lie."""
    batches = sorted(trained.glob("*.bin"))
    assert len(batches) == len(audit(run_dir / "ledger.jsonl").batches) > 0
    for path in batches:
        samples = [sample for group in read_file(path) for sample in group.samples]
        assert sum(int(np.count_nonzero(s.loss_mask)) for s in samples) > 0
        assert not any((s.log_probs == np.float32(MARK)).any() for s in samples), path


def flags(trained: Path, *engines: SpoiltEngine) -> list[str]:
    return [
        "--engine", "sglang", "--router", "none", "--router-policy", "round_robin",
        "--rollout-external-engine-addrs", *(engine.url for engine in engines),
        "--request-timeout-secs", str(REQUEST_S), "--max-filter-rounds", "100000", "--update-weight-rolling", "2",
        "--save-debug-rollout-data", str(trained / "{rollout_id}.bin"),
    ]  # fmt: skip


@pytest.mark.slow
def test_nothing_of_a_hostile_engine_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stages.sampling.routes.LONGEST_AVOIDED_S", 0.0)  # every second request is its own
    simulated = SimulatedEngineConfig(vocab_size=32, length_mean=6.0, update_s=0.01)
    config, model = EngineConfig(engine="simulated", simulated=simulated), made_model()[1]
    trained, run_dir = tmp_path / "trained", tmp_path / "run"
    with serving(SpoiltEngine(config, model, {})) as good, serving(Liar(config, model, seed=3)) as liar:
        length = ["--num-rollout", str(BATCHES), "--rollout-batch-size", "8"]
        done = here(run_dir, *SMALL, *made_model(), *SIMULATED_TRAINER, *flags(trained, good, liar), *length)
    assert done.code == 0, f"{done.out[-2000:]}\n{done.err[-3000:]}"
    done.check_books()
    check(run_dir, trained)
    assert done.summary["groups"]["trained"] == BATCHES * 8
    assert set(liar.told) == {*LIES, *NOISE}, "every kind had its turn"
    refused = [line for line in caplog.messages if line.startswith("an answer of ")]
    assert {kind for kind, words in REASONS.items() if not any(words in line for line in refused)} == set()
    assert [line for line in refused if "engine-1" not in line and "gave no answer" not in line] == []
    strange = [why for why in reasons(run_dir) if not any(words in why for words in (*REASONS.values(), *OTHERS))]
    assert strange == [], "nobody else failed"


def main() -> None:
    """The embedded engine beside a liar, with rewards by chance."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("seconds", type=float)
    asked = parser.parse_args()
    routes.LONGEST_AVOIDED_S = 1.0  # type: ignore[misc]  # else it would be asked once in half a minute
    model, trained = made_model()[1], asked.run_dir.with_name(f"{asked.run_dir.name}-trained")
    with serving(SpoiltEngine(EngineConfig(), model, {})) as good, serving(Liar(EngineConfig(), model, seed=3)) as liar:
        run = [*SMALL, *made_model(), "--num-rollout", "100000", "--deadline-s", str(asked.seconds)]
        code = program.main(
            ["--run-dir", str(asked.run_dir), *run, *flags(trained, good, liar), "--runner", "inprocess"]
        )
    Finished(code, "", "", asked.run_dir).check_books()
    check(asked.run_dir, trained)
    sys.stdout.write(f"exit code {code}, told {dict(liar.told)}\n")
    for detail, count in reasons(asked.run_dir).most_common():
        sys.stdout.write(f"{count:6} {detail}\n")


if __name__ == "__main__":
    main()
