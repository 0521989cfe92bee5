"""A small virtual environment with packages that look like SGLang, its router and torch: made in a moment, really run.

Its parsers have the kinds of options that the real ones have. Each import of the server's arguments leaves a line in
`imports.txt`, so that a test can count them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

SERVER = """
import os, pathlib, sys
import sgl_kernel                     # the shim, or an error
from sgl_kernel import anything_at_all
print("noise on stdout")
assert os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
assert "models" not in sys.modules and not any(p.endswith("engines/launch") for p in sys.path)
with open(pathlib.Path(__file__).parents[2] / "imports.txt", "a") as file:
    file.write("server\\n")

"""
SERVER_ARGS = """
import argparse

def human_readable_int(text):
    return int(text)

class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model", required=True, help="where the  model\\n is")
        for name in ("host", "weight-version", "log-level-http", "json-model-override-args"):
            parser.add_argument("--" + name)
        for name in ("port", "random-seed", "max-running-requests", "stream-interval", "nnodes", "node-rank",
                     "dp-size"):
            parser.add_argument("--" + name, type=int)
        parser.add_argument("--dist-init-addr")
        parser.add_argument("--enable-dp-attention", action="store_true")
        parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
        parser.add_argument("--pp-size", "--pipeline-parallel-size", type=int, default=1)
        parser.add_argument("--ep-size", "--expert-parallel-size", "--ep", type=int)
        parser.add_argument("--context-length", type=human_readable_int)
        parser.add_argument("--max-total-tokens", type=human_readable_int)
        parser.add_argument("--mem-fraction-static", type=float)
        parser.add_argument("--device")
        parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
        parser.add_argument("--attention-backend", choices=["triton", "torch_native", "fa3"])
        for name in ("cuda-graph-backend-decode", "cuda-graph-backend-prefill"):
            parser.add_argument("--" + name, choices=("full", "disabled"))
        for name in ("enable-metrics", "sleep-on-idle", "disable-overlap-schedule", "incremental-streaming-output",
                     "disable-radix-cache", "enable-memory-saver", "enable-deterministic-inference",
                     "enable-return-routed-experts", "skip-tokenizer-init"):
            parser.add_argument("--" + name, action="store_true", help=argparse.SUPPRESS)
        parser.add_argument("--enable-tf32-matmul", action=argparse.BooleanOptionalAction)
        parser.add_argument("--lora-paths", nargs="*", type=str)
        parser.add_argument("--cuda-graph-bs-decode", nargs="+", type=int)
        parser.add_argument("--preferred-sampling-params", type=__import__("json").loads)
        parser.add_argument("--log-level", default="info")
"""

ROUTER = """
class RouterArgs:
    @staticmethod
    def add_cli_args(parser, use_router_prefix=True):
        assert not use_router_prefix
        for name in ("host", "prometheus-host", "log-level", "api-key"):
            parser.add_argument("--" + name)
        for name in ("port", "prometheus-port", "request-timeout-secs", "health-check-interval-secs",
                     "health-check-timeout-secs", "health-failure-threshold", "cb-failure-threshold", "max-idle-secs",
                     "retry-max-retries"):
            parser.add_argument("--" + name, type=int)
        parser.add_argument("--cache-threshold", type=float, default=0.3)
        parser.add_argument("--policy", choices=["random", "round_robin", "cache_aware", "power_of_two", "manual"])
        parser.add_argument("--assignment-mode", choices=["random", "min_load", "min_group"])
        parser.add_argument("--worker-urls", nargs="*")
        parser.add_argument("--disable-retries", action="store_true")
        parser.add_argument("--disable-health-check", action="store_true")
        parser.add_argument("--pd-disaggregation", action="store_true")
        parser.add_argument("--prefill", nargs="+", action="append")
"""

TORCH = """
from types import SimpleNamespace
version = SimpleNamespace(cuda={cuda!r})
cuda = SimpleNamespace(is_available=lambda: False)
class Library:
    kept = []
    def __init__(self, *names): Library.kept.append(names)
    def define(self, schema): Library.kept.append(schema)
library = SimpleNamespace(Library=Library)
"""


class FakeEnvironment:
    """A virtual environment under `root`, without packages at first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.python = root / "bin" / "python"
        self.site = root / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        self.site.mkdir(parents=True)
        self.python.parent.mkdir()
        self.python.symlink_to(sys._base_executable)  # type: ignore[attr-defined]
        (root / "pyvenv.cfg").write_text(f"home = {Path(sys._base_executable).parent}\n")  # type: ignore[attr-defined]

    def install(self, name: str, version: str, files: dict[str, str]) -> None:
        """Put a package in place, or another version of it."""
        stem = name.replace("-", "_")
        for old in self.site.glob(f"{stem}-*.dist-info"):
            shutil.rmtree(old)
        metadata = self.site / f"{stem}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for place, text in files.items():
            file = self.site / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def install_all(self) -> FakeEnvironment:
        self.install_torch()
        self.install("sglang", "0.5.23", {"sglang/srt/server_args.py": SERVER + SERVER_ARGS})
        self.install("sglang-router", "0.3.2", {"sglang_router/router_args.py": ROUTER})
        return self

    def install_torch(self, cuda: str | None = None) -> None:
        self.install("torch", "2.13.0", {"torch.py": TORCH.format(cuda=cuda)})

    @property
    def imports(self) -> int:
        """How many processes have imported the server's arguments."""
        file = self.site / "imports.txt"
        return len(file.read_text().splitlines()) if file.exists() else 0
