"""Options that nothing in the run reads: refused, each with the setting that would read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.flags import flags
from configs.layers import ConfigError
from configs.load import dump_toml, load, recipe_names
from configs.resolve import resolve
from configs.rules.validate import checked, unread_faults, validate

BASE = ("--prompt-data", "arithmetic", "--num-rollout", "3", "--hf-checkpoint", "tiny-arithmetic")
EVALUATION = ("--eval-prompt-data", "arithmetic", "--eval-interval", "1")
REMOTE = ("--rm-type", "remote", "--rm-url", "http://localhost:8000/score")
JUDGE = ("--rm-type", "judge", "--judge-engine", "judge", "--frozen-engine", "judge=tiny")
TEACHER = ("--use-opd", "--frozen-engine", "teacher=tiny")
FSDP = ("--train-backend", "fsdp")
OWN_EQUIVALENCE = ("--rm-type", "boxed_math")


def unread(*argv: str) -> tuple[str, ...]:
    loaded = load([*BASE, *argv])
    return tuple(unread_faults(resolve(loaded.config, loaded.given), loaded.given))


@pytest.mark.parametrize(
    ("option", "without", "reader", "with_it"),
    [
        (("--n-samples-per-eval-prompt", "2"), (), "--eval-prompt-data", EVALUATION),
        (("--eval-temperature", "1"), (), "--eval-prompt-data", EVALUATION),
        (("--eval-max-response-len", "9"), (), "--eval-prompt-data", EVALUATION),
        (("--eval-input-key", "question"), (), "--eval-prompt-data", EVALUATION),
        (("--eval-label-key", "answer"), (), "--eval-prompt-data", EVALUATION),
        (("--eval-deadline-s", "9"), (), "--eval-prompt-data", EVALUATION),
        (("--skip-eval-before-train",), (), "--eval-prompt-data", EVALUATION),
        (("--warm-start-batch-size", "9"), (), "--warm-start-steps above 0", ("--warm-start-steps", "1")),
        (("--warm-start-target-loss", "9"), (), "--warm-start-steps above 0", ("--warm-start-steps", "1")),
        (("--warm-start-lr", "9"), (), "--warm-start-steps above 0", ("--warm-start-steps", "1")),
        (("--warm-start-data", "arithmetic-tools"), (), "--warm-start-steps above 0", ("--warm-start-steps", "1")),
        (("--warm-start-label-key", "answer"), (), "--warm-start-steps above 0", ("--warm-start-steps", "1")),
        (("--tool-deadline-s", "9"), (), "--tools", ("--tools", "calculator")),
        (("--tool-memory-gb", "9"), (), "--tools", ("--tools", "calculator")),
        (("--tool-result-template", "{result}!"), (), "--tools", ("--tools", "calculator")),
        (("--tool-call-open", "["), (), "--tools or an [[environment]]", ('environment=[{"name": "maze"}]',)),
        (("--max-turns", "9"), (), "a loop stage or a function of yours that generates", ("--tools", "calculator")),
        (
            ("--custom-generate-deadline-secs", "9"),
            (),
            "a function of yours that generates",
            ("--custom-generate-function-path", "json:loads"),
        ),
        (("--rm-concurrency", "9"), (), "a remote grader or a judge", REMOTE),
        (("--rm-timeout-s", "9"), (), "a remote grader or a judge", JUDGE),
        (("--rm-retries", "9"), (), "a remote grader or a judge", REMOTE),
        (("--judge-max-tokens", "9"), REMOTE, "a judge", JUDGE),
        (("--judge-prompt-path", "x"), REMOTE, "a judge", JUDGE),
        (("--math-equivalence", "verify"), ("--rm-type", "exact"), "the grader math", OWN_EQUIVALENCE),
        (("--overlong-penalty-factor", "9"), (), "--overlong-buffer-len above 0", ("--overlong-buffer-len", "1")),
        (("--opd-kl-coef", "9"), (), "--use-opd", TEACHER),
        (("--opd-teacher-key", "math"), (), "--use-opd", TEACHER),
        (("--kl-loss-type", "k3"), (), "--use-kl-loss", ("--use-kl-loss", "--kl-loss-coef", "0.1")),
        (
            ("--update-weight-buffer-size", "9"),
            (),
            "--update-weight-transport distributed or tensor",
            ("--update-weight-transport", "tensor", "--engine", "sglang"),
        ),
        (("--check-weight-update-equal",), (), "several engines", ("--scale", "engine=2")),
        (("--check-weight-update-equal",), (), "several engines", ("--autoscale", "engine=1..2")),
        (("--simulated-step-s", "9"), (), "--train-backend simulated", ("--train-backend", "simulated")),
        (("engine.simulated.a_ms=9",), (), "--engine simulated", ("--engine", "simulated")),
        (("--distributed-timeout-minutes", "9"), (), "a trainer in processes of its own", FSDP),
        (("--prometheus-host", "::"), (), "--prometheus-port above 0", ("--prometheus-port", "9")),
        (("--samples-groups", "9"), ("--samples-interval", "0"), "--samples-interval above 0", ()),
        (("--critic-load", "tiny"), (), "--advantage-estimator ppo", ("--advantage-estimator", "ppo")),
        (("--dppo-kl-coef", "9"), (), "--policy-loss dppo", ("--policy-loss", "dppo")),
        (("--dppo-kl-coef", "9"), (), "--policy-loss dppo", ("--policy-loss", "json:loads")),
    ],
)
def test_an_option_that_nothing_reads_is_refused(
    option: tuple[str, ...], without: tuple[str, ...], reader: str, with_it: tuple[str, ...]
) -> None:
    (fault,) = unread(*option, *without)
    name = option[0].partition("=")[0]
    assert fault.startswith(f"{name} is ")
    assert fault.endswith(f", but only {reader} reads it; choose that, or leave it out")
    assert unread(*option, *with_it) == ()


def test_a_default_and_what_is_derived_are_no_options() -> None:
    assert (
        unread("--prometheus-host", "127.0.0.1", "--eval-label-key", "label", "--critic-load", "tiny-arithmetic") == ()
    )


def test_each_fault_stands_among_the_others() -> None:
    loaded = load([*BASE, "--gamma", "0.9", "--scale", "train=2"])
    with pytest.raises(ConfigError) as caught:
        checked(loaded.config, loaded.given)
    assert len(caught.value.faults) == 2
    with pytest.raises(ConfigError, match="--gamma is"):
        validate(load([*BASE, "--gamma", "0.9"]).config)


def test_a_recipe_may_keep_what_a_flag_above_it_switches_off(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[warm_start]\nwarm_start_steps = 5\nwarm_start_lr = 0.5\n", encoding="utf-8")
    assert unread("--config", str(recipe)) == ()
    assert unread("--config", str(recipe), "--warm-start-steps", "0") == ()
    assert len(unread("--config", str(recipe), "--warm-start-steps", "0", "--warm-start-lr", "0.4")) == 1
    loaded = load([*BASE, "--config", str(recipe), "--warm-start-steps", "0"])
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(dump_toml(resolve(loaded.config, loaded.given)), encoding="utf-8")
    assert unread("--resume", str(run)) == (), "a run that was started can go on"
    recipe.write_text("[warm_start]\nwarm_start_lr = 0.5\n", encoding="utf-8")
    assert len(unread("--config", str(recipe))) == 1, "nothing ever reads it"


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_hold_nothing_unread(name: str, tmp_path: Path) -> None:
    """Nor does a recipe that spells out all derived values."""
    loaded = load(["--config", "toy", name])
    config = resolve(loaded.config, loaded.given)
    assert tuple(unread_faults(config, loaded.given)) == ()
    (tmp_path / "whole.toml").write_text(dump_toml(config), encoding="utf-8")
    again = load(["--config", str(tmp_path / "whole.toml")])
    assert tuple(unread_faults(resolve(again.config, again.given), again.given)) == ()


def test_every_condition_names_what_there_is() -> None:
    """A condition is read when it is judged: each field away from its default asks for its own."""
    conditional = [flag for flag in flags() if flag.read_by]
    assert len(conditional) > 100
    given = {flag.key: flag.key for flag in conditional}
    assert tuple(unread_faults(resolve(load([*BASE]).config), given)) == ()
