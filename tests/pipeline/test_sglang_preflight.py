"""What is asked of SGLang's environment before a run starts, and what the user is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.schema import Config, EngineConfig, RouterConfig, SglangConfig, TrainConfig
from models.engines.launch.environment import Installed
from pipeline.errors import Refused, UsageError
from pipeline.preflight.sglang import parts, prepare_sglang, warnings
from tests.models.engines.launch.fake_environment import FakeEnvironment

SGLANG = EngineConfig(engine="sglang")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEnvironment:
    made = FakeEnvironment(tmp_path / "env").install_all()
    monkeypatch.setenv("SLUICE_SGLANG_PYTHON", str(made.python))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(), ()),
        (Config(engine=SGLANG), ("server", "router")),
        (Config(engine=SGLANG, router=RouterConfig(router="smg")), ("server", "smg")),
        (Config(engine=SGLANG, router=RouterConfig(router="none")), ("server",)),
        (Config(engine=SGLANG, router=RouterConfig(router_address="http://h:1")), ("server",)),
        (Config(router=RouterConfig(router="sglang")), ("router",)),
        (Config(engine=SGLANG, sglang=SglangConfig(rollout_external_engine_addrs=("http://h:1",))), ("router",)),
        (
            Config(
                engine=EngineConfig(engine="sglang", frozen_engine=("teacher=/model",)),
                sglang=SglangConfig(rollout_external_engine_addrs=("http://h:1",)),
            ),
            ("server", "router"),
        ),
        (Config(engine=SGLANG, train=TrainConfig(loss_type="sft_loss")), ()),
    ],
)
def test_only_what_the_run_starts_is_asked_for(config: Config, expected: tuple[str, ...]) -> None:
    assert parts(config) == expected


def test_a_run_without_sglang_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_SGLANG_PYTHON", "/nowhere/python")
    installed = prepare_sglang(Config())
    assert (installed.sglang, installed.router, installed.smg) == (None, None, None)


def test_what_is_installed(environment: FakeEnvironment) -> None:
    installed = prepare_sglang(Config(engine=SGLANG))
    assert installed.python == str(environment.python)
    assert (installed.sglang, installed.torch, installed.router) == ("0.5.23", "2.13.0", "0.3.2")
    assert installed.server_options
    assert prepare_sglang(Config(router=RouterConfig(router="sglang"))).router_options


def test_all_faults_are_told_together(environment: FakeEnvironment) -> None:
    config = Config(
        engine=SGLANG,
        sglang=SglangConfig(sglang_args={"mem_fraction_statc": "0.8", "port": 1}),
        router=RouterConfig(router_args={"assignment_mode": "minload"}),
    )
    with pytest.raises(Refused) as caught:
        prepare_sglang(config)
    first, second, third = caught.value.faults
    assert "did you mean --sglang-mem-fraction-static?" in first
    assert "--sglang-port cannot be passed on: use --engine-port" in second
    assert "is 'minload', but must be one of min_group, min_load, random; did you mean min_load?" in third


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            Config(engine=SGLANG, sglang=SglangConfig(sglang_args={"bogus": 1})),
            "--sglang-bogus is no option of SGLang 0",
        ),
        (Config(engine=SGLANG, sglang=SglangConfig(rollout_num_gpus_per_engine=2)), "sees no GPU; set it to 1"),
        (Config(engine=SGLANG, router=RouterConfig(router="smg")), "smg is not installed"),
    ],
)
def test_one_fault_is_one_sentence(environment: FakeEnvironment, config: Config, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        prepare_sglang(config)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_environment_is_a_usage_error(tmp_path: Path, environment: FakeEnvironment) -> None:
    empty = FakeEnvironment(tmp_path / "empty")
    config = Config(engine=SGLANG, sglang=SglangConfig(sglang_python=str(empty.python)))
    with pytest.raises(UsageError, match=r"SGLang is not installed in the environment of .*; run `make sglang-env`"):
        prepare_sglang(config)


def test_the_flag_outranks_the_variable(environment: FakeEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_SGLANG_PYTHON", "/nowhere/python")
    arguments: dict[str, Any] = {"sglang_python": str(environment.root)}
    assert prepare_sglang(Config(engine=SGLANG, sglang=SglangConfig(**arguments))).python == str(environment.python)


CUDA = Installed(python="python", python_version="3.11", cuda=True)


@pytest.mark.parametrize(
    ("mode", "arguments", "external", "cuda", "told"),
    [
        ("in_place", {}, (), True, True),
        ("in_place", {"disable_overlap_schedule": False}, (), True, True),
        ("in_place", {"disable-overlap-schedule": True}, (), True, False),
        ("retract", {}, (), True, False),
        ("in_place", {}, ("http://h:1",), True, False),
        ("in_place", {}, (), False, False),  # where it is switched off
    ],
)
def test_updates_in_place_under_overlap_scheduling_are_warned_of(
    mode: Any, arguments: dict[str, Any], external: tuple[str, ...], cuda: bool, told: bool
) -> None:
    config = Config(
        engine=EngineConfig(engine="sglang", pause_generation_mode=mode),
        sglang=SglangConfig(sglang_args=arguments, rollout_external_engine_addrs=external),
    )
    lines = [*warnings(config, msgspec.structs.replace(CUDA, cuda=cuda))]
    assert bool(lines) == told
    assert all("use --pause-generation-mode retract, or --sglang-disable-overlap-schedule" in line for line in lines)


def test_a_warning_is_told_before_the_start_and_once(
    environment: FakeEnvironment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeline.preflight.sglang.probe", lambda python, wanted: CUDA)
    monkeypatch.setattr("pipeline.preflight.sglang._faults", lambda *_: ())
    config = Config(engine=EngineConfig(engine="sglang", pause_generation_mode="in_place"))
    prepare_sglang(config)
    assert capsys.readouterr().err.startswith("warning: --pause-generation-mode is in_place, and SGLang's overlap")
    prepare_sglang(config, warn=False)
    assert capsys.readouterr().err == ""
