"""What processes without a model import, and what they must not import with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import pathlib, sys
from importlib import import_module
for heavy, modules in (
    (("torch", "transformers", "safetensors", "tokenizers", "zmq"), (
        "models.engines.client", "models.engines.protocol", "models.errors", "models.engines.noise",
    )),
    (("torch",), (
        "models.algorithms.advantages", "models.algorithms.aggregation", "models.weights.layout",
        "models.weights.shared_memory_reader", "models.engines.serve", "models.engines.simulated.engine", "models.tiny",
    )),
):
    for module in modules:
        import_module(module)
        found = [name for name in heavy if name in sys.modules]
        assert not found, f"{module} imports {found}"
sys.modules["models.algorithms.advantages"].advantages("grpo", [1, 0], [0, 1])
sys.modules["models.tiny"].make_tiny_checkpoint(pathlib.Path(sys.argv[1]))
assert "torch" not in sys.modules
"""


def test_clients_stages_readers_and_the_simulated_engine_load_no_torch(tmp_path: Path) -> None:
    """Nor does it take torch to compute advantages of groups and to make a tiny checkpoint."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path / "m"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
