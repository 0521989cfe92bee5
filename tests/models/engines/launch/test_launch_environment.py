"""Which interpreter is taken, and what it is asked: in real processes of a small environment."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from configs.schema import SglangConfig
from models.engines.launch.environment import PYTHON_VARIABLE, SHIMS, find_python, probe
from models.engines.launch.environment import main as remember
from models.engines.launch.inside import install_shim, main
from models.errors import EnvironmentMissing
from tests.models.engines.launch.fake_environment import FakeEnvironment


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEnvironment:
    """Answers are kept in the test's own directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return FakeEnvironment(tmp_path / "env").install_all()


def interpreter(root: Path) -> Path:
    python = root / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return python


def test_flag_then_variable_then_project_then_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    project = tmp_path / "project"
    project.mkdir()
    assert find_python(SglangConfig(), project) == Path(sys.executable)
    own = interpreter(project / ".venv-sglang")
    assert find_python(SglangConfig(), project) == own
    named = interpreter(tmp_path / "named")
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "named"))  # a directory stands for the environment in it
    assert find_python(SglangConfig(), project) == named
    flagged = interpreter(tmp_path / "flagged")
    assert find_python(SglangConfig(sglang_python=str(flagged)), project) == flagged


def test_what_is_named_but_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentMissing, match=r"--sglang-python is '.*nowhere', .* run `make sglang-env`"):
        find_python(SglangConfig(sglang_python=str(tmp_path / "nowhere")), tmp_path)
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path))  # a directory without an environment
    with pytest.raises(EnvironmentMissing, match=f"{PYTHON_VARIABLE} is .* no Python interpreter"):
        find_python(SglangConfig(), tmp_path)


def test_an_answer_is_kept_until_the_installation_changes(
    environment: FakeEnvironment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert remember([str(environment.python)]) == 0  # as at the end of an installation
    assert capsys.readouterr().out == "SGLang 0.5.23 (CPU, torch 2.13.0), sglang-router 0.3.2\n"
    first = probe(environment.python)
    assert environment.imports == 1
    environment.install("sglang", "0.5.24", {})
    assert probe(environment.python).sglang == "0.5.24"
    assert environment.imports == 2
    for file in (tmp_path / "home").rglob("*.json"):
        file.write_text("{")  # a broken answer is asked anew
    assert probe(environment.python).options["server"] == first.options["server"]
    assert environment.imports == 3
    environment.install("sglang", "0.5.25", {"sglang/srt/server_args.py": "import nothing_of_the_kind"})
    assert remember([str(environment.python)]) == 1
    words = "does not import: ModuleNotFoundError: No module named 'nothing_of_the_kind'; make it again with"
    assert words in capsys.readouterr().err


def test_a_missing_sglang_names_the_cure(tmp_path: Path) -> None:
    empty = FakeEnvironment(tmp_path / "empty")
    with pytest.raises(EnvironmentMissing, match=r"SGLang is not installed in .*; run `make sglang-env`"):
        probe(empty.python)
    with pytest.raises(EnvironmentMissing, match=r"cannot be run .*make sglang-env"):
        probe(tmp_path / "absent")
    assert probe(empty.python, ("router",)).router is None


def run(environment: FakeEnvironment, code: str) -> str:
    done = subprocess.run([environment.python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_the_torchvision_shim_declares_before_the_import(environment: FakeEnvironment) -> None:
    assert install_shim(environment.python)
    (environment.site / "torchvision.py").write_text(
        "import torch\nassert len(torch.Library.kept) == 3, torch.Library.kept\nprint(torch.Library.kept)"
    )
    before, after = run(environment, "import sys; print('torch' in sys.modules); import torchvision").splitlines()
    assert before == "False"  # nothing heavy until torchvision is looked up
    assert "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" in after


def test_the_torchvision_shim_leaves_with_cuda(
    environment: FakeEnvironment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("install-shim", [str(environment.python)]) == 0
    assert list(environment.site.glob("sluice_*"))
    environment.install_torch(cuda="13.0")
    assert not install_shim(environment.python)
    assert not list(environment.site.glob("sluice_*"))
    (environment.site / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    assert main("install-shim", [str(environment.python)]) == 1
    assert (
        "libcudart.so.13 is missing; on a machine without a GPU pip must find the CPU build" in capsys.readouterr().err
    )


# The stand-in for SGLang's kernels: imports succeed, one function computes, the others are loud.


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SHIMS))
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    return importlib.import_module("sgl_kernel")


def test_each_row_gets_its_own_locations(kernel: ModuleType) -> None:
    pool = torch.zeros(3, 6, dtype=torch.int32)
    kernel.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), pool, torch.tensor([1, 0]), torch.tensor([4, 2]), torch.tensor([7, 8, 9, 5, 6]), 6
    )
    assert pool.tolist() == [[5, 6, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 7, 8, 9, 0, 0]]
    assert pool.dtype == torch.int32


def test_other_names_import_and_fail_when_called(kernel: ModuleType) -> None:
    name = kernel.copy_all_layer_kv_cache_cpu
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.copy_all_layer_kv_cache_cpu is a CUDA kernel"):
        name(1, 2)
    with pytest.raises(AttributeError):
        _ = kernel.__path_to_nowhere__
    # With this operator SGLang would take itself for a build with CPU kernels.
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
