"""Server processes: ready file, signals, the parent's death, ports, crashes."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from models.engines.client import EngineClient
from models.engines.embedded.engine import _affordable_slots
from models.engines.embedded.model_spec import ModelSpec
from models.engines.embedded.stepper import Stepper
from models.engines.protocol import VersionSpan
from models.engines.serve import EngineServer
from models.engines.streamed import PartialOutputs
from models.errors import EngineError, EngineStartError, EngineUnreachable, WeightsRefused
from tests.models.engines.harness import EMBEDDED, SIMULATED, Bench, Checkpoints, ask, streamed, variant

ARGUMENTS = ["-m", "models.engines.serve", "--engine", "simulated", "--model-path", "none"]


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> dict[str, object]:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, "the server process ended early"
        assert time.monotonic() < deadline, "the server did not become ready"
        time.sleep(0.01)
    ready: dict[str, object] = json.loads(path.read_text())
    return ready


def gone(pid: int) -> bool:
    """True once no such process runs (a zombie that nobody reaps counts as gone)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, object]]]:
    ready = tmp_path / "ready.json"
    child = subprocess.Popen([sys.executable, *ARGUMENTS, "--ready-file", str(ready), "--weight-version", "3.7"])
    try:
        yield child, wait_for(ready, child)
    finally:
        child.kill()
        child.wait()


async def test_a_killed_engine_leaves_what_it_streamed(process) -> None:  # type: ignore[no-untyped-def]
    child, ready = process
    partial = PartialOutputs()
    async with EngineClient(str(ready["url"])) as client:
        request = ask([1, 2, 3], n=2, max_new_tokens=100_000, stream_interval=1)
        task = asyncio.ensure_future(client.generate(request, partial=partial))
        await streamed(partial, 20)
        child.kill()
        with pytest.raises(EngineUnreachable):
            await task
    assert not partial.complete
    for prefix in partial.certain():
        assert prefix.version_spans == [VersionSpan("3.7", 0, len(prefix.output_ids))]
        assert len(prefix.output_ids) == len(prefix.output_log_probs) >= 9


def test_the_server_dies_with_its_parent(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    code = (
        "import subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, *{[*ARGUMENTS, '--ready-file', str(ready)]!r}]); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    pid = int(str(wait_for(ready, parent)["pid"]))
    assert not gone(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.01)


def test_bad_arguments_are_one_clear_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "models.engines.serve", "--model-path", str(tmp_path), "--config"]
    refused = subprocess.run([*command, '{"engine_slot": 3}'], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr == "error: Object contains unknown field `engine_slot`\n"
    refused = subprocess.run([*command, "{}", "--log-level", "loud"], capture_output=True, text=True, check=False)
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    words = "error: argument --log-level: invalid choice: 'loud' (choose from 'debug', 'info', 'warning', 'error')"
    assert refused.stderr.splitlines()[-1].endswith(words)


async def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = EngineServer(SIMULATED, "none", max_context_len=None, seed=0, port=port)
        with pytest.raises(EngineStartError, match=rf"port {port} of 127\.0\.0\.1 is in use; choose another --port"):
            async with server:
                pass


async def test_a_crash_of_the_engine_answers_everything_and_is_reported(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Stepper) -> None:
        raise RuntimeError("no memory left")

    async with (
        EngineServer(EMBEDDED, str(checkpoints()), max_context_len=1024, seed=0) as server,
        EngineClient(server.url) as client,
    ):
        monkeypatch.setattr(Stepper, "step", broken)
        [output] = await client.generate(ask([1, 2]))
        assert output.aborted
        with pytest.raises(EngineError, match="the engine died: RuntimeError: no memory left"):
            await server.wait()
        assert not await client.health()
        with pytest.raises(EngineError, match="503"):
            await client.generate(ask([1, 2]))


# Reading checkpoints: what is accepted, what is refused with which words, and that a refusal changes nothing.


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_names_and_checksums_are_those_of_the_checkpoint(checkpoints: Checkpoints, architecture: str) -> None:
    path = checkpoints(architecture=architecture, tie_word_embeddings=False)
    tensors = load_file(path / "model.safetensors")
    expected = {name: xxhash.xxh3_64_hexdigest(tensor.numpy().tobytes()) for name, tensor in tensors.items()}
    assert Bench(path).engine._weights.checksums() == expected


NORM = "model.norm.weight"
# What becomes of the tensors, what is left of the file, words
UNFIT: dict[str, tuple[dict[str, torch.Tensor | None], int | None, str]] = {
    "missing": ({NORM: None}, None, r"does not fit the served model: missing model\.norm\.weight"),
    "unknown": ({"model.extra.weight": torch.zeros(3)}, None, r"unknown model\.extra\.weight"),
    "shape": ({NORM: torch.zeros(7)}, None, r"model\.norm\.weight has shape \[7\], served is \[96\]"),
    "dtype": ({NORM: torch.zeros(96, dtype=torch.int32)}, None, r"norm\.weight has dtype I32, expected one of F32"),
    "torn": ({}, -1000, "cannot be read"),
}


@pytest.mark.parametrize("damage", [*UNFIT, "empty"])
def test_what_does_not_fit_is_refused_and_changes_nothing(
    checkpoints: Checkpoints, tmp_path: Path, damage: str
) -> None:
    words = r"holds no \*\.safetensors; give a directory in Hugging Face format"
    if damage != "empty":
        changes, end, words = UNFIT[damage]
        tensors = load_file(checkpoints(seed=1) / "model.safetensors") | changes
        file = tmp_path / "model.safetensors"
        save_file({name: one for name, one in tensors.items() if one is not None}, file, metadata={"format": "pt"})
        file.write_bytes(file.read_bytes()[:end])
    bench = Bench(checkpoints())
    before = bench.engine._weights.checksums()
    [first] = bench.run(bench.make(list(range(1, 41)), max_new_tokens=3))
    with pytest.raises(WeightsRefused, match=words):
        bench.swap(tmp_path, "w2")
    assert bench.engine._weights.checksums() == before
    assert bench.stepper.label == "w1"
    [again] = bench.run(bench.make(list(range(1, 41)), max_new_tokens=3))
    assert (first.cached_tokens, again.cached_tokens) == (0, 39)  # nor is the cache lost


@pytest.mark.parametrize(("config", "words"), [
    ({"architectures": ["Mixtral"]}, r"architectures=\['Mixtral'\].*serve this model with SGLang"),
    ({"hidden_act": "gelu"}, r"hidden_act='gelu'.*only silu"),
    ({"use_sliding_window": True}, "use_sliding_window=True.*only full attention"),
    ({"layer_types": ["sliding_attention"]}, "layer_types=.*only full attention"),
    ({"quantization_config": {"bits": 4}}, "quantization_config=.*only unquantised"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters=.*default, linear and llama3"),
])  # fmt: skip
def test_models_that_cannot_be_served_are_named(
    checkpoints: Checkpoints, tmp_path: Path, config: dict[str, object], words: str
) -> None:
    with pytest.raises(EngineStartError, match=words):
        ModelSpec.read(variant(checkpoints(), tmp_path, **config))


def test_engines_that_cannot_start_say_why(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        EngineStartError, match=r"config\.json cannot be read .*; give a directory in Hugging Face format"
    ):
        Bench(tmp_path)
    with pytest.raises(EngineStartError, match="engine_device='nonsense' is not a device; use auto, cpu"):
        Bench(checkpoints(), engine_device="nonsense")
    monkeypatch.setattr("models.engines.embedded.engine._CPU_SHARE", 0.0)
    with pytest.raises(EngineStartError, match=r"one slot of 256 tokens needs .* a smaller --rollout-max-context-len"):
        Bench(checkpoints())


def test_the_cache_takes_its_share_of_a_gpu_and_no_more_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50_000, 100_000))
    slots = [_affordable_slots(256, 99, 10, device, share) for share in (0.3, 0.9)]
    assert slots == [30, 40]  # of 1,000 bytes
