"""A tiny model visibly learns through clients that know nothing of Sluice, each in the environment that has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import SMALL, made_model, succeed_here

from tests.agent_clients import interpreter

pytestmark = pytest.mark.slow

SEVENS = '''
def sevens(response, label, metadata):
    """The share of sevens: dense, and learned within a few batches by a random model."""
    return response.count("7") / max(len(response), 1)
'''
RECIPE = """
[[environment]]
name = "{pack}"
python = "{python}"
"""


@pytest.mark.parametrize(("pack", "module"), [("openai_client", "openai"), ("openai_agents", "agents")])
def test_a_model_learns_through_a_client(pack: str, module: str, tmp_path: Path) -> None:
    """A random model's answers have one seven in twenty characters."""
    (tmp_path / "sevens.py").write_text(SEVENS)
    (tmp_path / "agent.toml").write_text(RECIPE.format(pack=pack, python=interpreter(module)))
    done = succeed_here(
        tmp_path / "run", "--config", str(tmp_path / "agent.toml"), *SMALL, *made_model(),
        "--custom-rm-path", "sevens:sevens", "--rm-type", "auto", "--num-rollout", "16", "--rollout-batch-size", "4",
        "--n-samples-per-prompt", "8", "--rollout-max-response-len", "8", "--lr", "2e-3", "--log-interval", "5",
        cwd=tmp_path,
    )  # fmt: skip
    done.check_books()
    reward = done.summary["reward"]
    assert reward["first"] < 0.2, reward
    assert reward["last"] > 0.45, reward
    assert done.summary["groups"]["failed"] == 0
