"""What parts of a run alone exclude, refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from configs.graph import engine_count, loops, path
from configs.resolve import derive
from configs.rules.reward import tool_faults
from configs.rules.run import debug_faults
from configs.schema import Config


def a_config(**sections: Any) -> Config:
    return msgspec.convert({"rollout": {"num_rollout": 2}, **sections}, Config)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"debug": {"debug_train_only": True}}, "nothing to train on; give --load-debug-rollout-data"),
        ({"debug": {"debug_train_only": True, "debug_rollout_only": True}}, "--debug-train-only does not"),
        ({"debug": {"debug_rollout_only": True, "load_debug_rollout_data": "x"}}, "--load-debug-rollout-data does not"),
        ({"debug": {"save_debug_rollout_data": "all.msgpack"}}, "each batch would replace the one before"),
        ({"debug": {"save_debug_rollout_data": "{step}"}}, "the only name in braces is {rollout_id}"),
        ({"debug": {"load_debug_rollout_data": "/no/{}"}}, "the only name in braces is {rollout_id}"),
        ({"debug": {"load_debug_rollout_data": "/no/{rollout_id}"}}, "there is no /no/0 for batch 0; correct the path"),
        ({"debug": {"load_debug_rollout_data": "x"}, "run": {"resume": "y"}}, "cut differently"),
        ({"debug": {"load_debug_rollout_data": "x"}, "train": {"loss_type": "sft_loss"}}, "leave one out"),
        ({"debug": {"fault_inject": ["reward:0.1:die"]}}, "'reward:0.1:die': the kind is 'die' and must be one of"),
        ({"debug": {"fault_inject": ["rewards:0.1:kill"]}}, "no stage rewards in this run that takes messages; choose"),
        ({"debug": {"fault_inject": ["engines:0.1:kill"]}}, "no stage engines in this run that takes messages"),
        ({"debug": {"fault_inject": ["reward:0.1:drop"]}}, "only engine has it; choose another kind"),
        (
            {"debug": {"fault_inject": ["engine:0.1:hang"]}, "engine": {"engine": "sglang"}},
            "SGLang's servers can only be killed on purpose; choose kill, --engine simulated, or disturb generate",
        ),
        (
            {
                "debug": {"fault_inject": ["engine:0.1:kill"]},
                "sglang": {"rollout_external_engine_addrs": ["http://10.0.0.1:3000"]},
            },
            "engines that are not started by the run have no faults on purpose",
        ),
        ({"debug": {"fault_inject": ["rank:0.1:kill"]}}, "no stage rank in this run that takes messages"),
        (
            {"debug": {"fault_inject": ["reward:0.1:kill"]}, "run": {"runner": "inprocess"}},
            "would be of the whole run; choose --runner local",
        ),
    ],
)
def test_faults(sections: dict[str, Any], words: str) -> None:
    faults = list(debug_faults(a_config(**sections)))
    assert any(words in fault for fault in faults), faults


def test_faults_that_a_run_can_have_are_taken() -> None:
    every = ["engine:1:drop", "prompts:0.1:kill", "generate:0.1:hang", "reward:0.1:error", "train:0.5:slow:3"]
    assert not list(debug_faults(a_config(debug={"fault_inject": every})))
    assert not list(debug_faults(a_config(debug={"fault_inject": ["engine:1:kill"]}, engine={"engine": "sglang"})))
    ranks = {"debug": {"fault_inject": ["rank:1:hang"]}, "parallel": {"actor_num_gpus_per_node": 2}}
    assert not list(debug_faults(a_config(**ranks)))
    assert not list(debug_faults(a_config(**ranks, run={"runner": "inprocess"}))), "they are processes all the same"
    sft = a_config(debug={"fault_inject": ["reward:0.1:kill"]}, train={"loss_type": "sft_loss"})
    assert any("choose one of prompts, train" in fault for fault in debug_faults(sft))


def test_a_missing_batch_is_named_with_the_length_that_works(tmp_path: Path) -> None:
    (tmp_path / "0").touch()
    config = a_config(debug={"load_debug_rollout_data": str(tmp_path / "{rollout_id}")})
    (fault,) = debug_faults(config)
    assert f"no {tmp_path}/1 for batch 1; set --num-rollout to at most 1" in fault
    (tmp_path / "1").touch()
    assert not list(debug_faults(config))


def test_a_function_that_makes_whole_rollouts_excludes_loops() -> None:
    config = a_config(rollout={"custom_generate_function_path": "x:y"}, tools={"tools": ["calculator"]})
    assert any("the stage agents would never be reached" in fault for fault in tool_faults(config))
    assert not list(tool_faults(a_config(rollout={"custom_generate_function_path": "x:y"})))
    batches = {"rollout_function_path": "x:y"}
    (fault,) = tool_faults(a_config(rollout=batches, run={"scale": {"generate": 2}}))
    assert fault.startswith("--scale generate=2 shares prompts out, but --rollout-function-path")
    assert not list(tool_faults(a_config(rollout=batches)))


def test_import_paths_may_have_a_dot_before_the_name() -> None:
    config = a_config(
        rollout={"custom_generate_function_path": "a.b.generate"},
        reward={"custom_rm_path": "rewards.score"},
        data={"chat_template_path": "a.jinja"},
    )
    resolved, _ = derive(config)
    assert resolved.rollout.custom_generate_function_path == "a.b:generate"
    assert resolved.reward.custom_rm_path == "rewards:score"
    assert resolved.data.chat_template_path == "a.jinja", "a file"
    assert derive(resolved)[0] == resolved


def test_saved_batches_need_neither_engines_nor_tools() -> None:
    config = a_config(debug={"load_debug_rollout_data": "x"}, tools={"tools": ["calculator"]})
    assert path(config) == ("prompts", "train")
    assert loops(config) == ()
    assert engine_count(config) == 0
    assert not list(debug_faults(a_config(debug={"debug_train_only": True}, train={"loss_type": "sft_loss"})))
