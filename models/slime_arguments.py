"""`args` of functions written for slime: every setting under the name of its flag, with underscores.

Most flags have slime's names. Added are the address of the model, settings that slime derives, and constants for
those of its settings that do not exist here. A file for itself, since stages and trainers hand it to such functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec

from configs.schema import Config

# Settings of slime with a constant value here.
_FIXED: Mapping[str, object] = {
    "debug_train_only": False,
    "mask_offpolicy_in_partial_rollout": False,
    "multimodal_keys": None,
    "rollout_skip_special_tokens": True,
    "sglang_enable_deterministic_inference": False,
    "sglang_speculative_algorithm": None,
    "use_opd": False,
    "use_rollout_routing_replay": False,
    "use_slime_router": False,
    "ci_test": False,
}


class SlimeArguments(SimpleNamespace):
    """Settings by name. The error for an unknown name points to the documentation."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args has no {name!r}: it is no setting of this run; see docs/custom_generate.md for the names, and "
            f"python launch.py --help for all settings"
        )

    def with_router(self, url: str, key: str = "") -> SlimeArguments:
        """A copy with this address as the router. `key` becomes the user of the host: `KEY@HOST`."""
        host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
        named = f"{key}@{host}" if key else host
        return SlimeArguments(**{**vars(self), "sglang_router_ip": named, "sglang_router_port": int(port)})


def slime_arguments(config: Config, **more: object) -> SlimeArguments:
    """All settings of a configuration under the names of their flags."""
    values: dict[str, object] = dict(_FIXED)
    for section in Config.__struct_fields__:
        value = getattr(config, section)
        if isinstance(value, msgspec.Struct):
            values |= {name: getattr(value, name) for name in value.__struct_fields__}
    files = config.data.prompt_data
    values |= {
        "calculate_per_token_loss": config.algorithm.loss_aggregation == "token_mean",
        "sglang_server_concurrency": config.rollout.server_concurrency,
        "apply_chat_template_kwargs": dict(config.data.apply_chat_template_kwargs),
        "rollout_stop": list(config.rollout.rollout_stop) or None,
        "rollout_stop_token_ids": list(config.rollout.rollout_stop_token_ids) or None,
        "prompt_data": files[0] if len(files) == 1 else list(files) or None,
        "eval_datasets": [_eval_dataset(config, name, path) for name, path in config.eval.data_sets],
        "sglang_router_ip": None,
        "sglang_router_port": None,
        **{name: None if value == "none" else value for name, value in config.rollout.custom_args.items()},
        **more,
    }
    return SlimeArguments(**values)


def _eval_dataset(config: Config, name: str, path: str) -> SimpleNamespace:
    own, data = config.eval.of(name), config.data
    return SimpleNamespace(
        name=name,
        path=path,
        rm_type=config.eval.own(name).rm_type or config.reward.rm_type,
        n_samples_per_eval_prompt=own.n_samples_per_eval_prompt,
        temperature=own.eval_temperature,
        top_p=own.eval_top_p,
        top_k=own.eval_top_k,
        max_response_len=own.eval_max_response_len or config.rollout.rollout_max_response_len,
        input_key=own.eval_input_key or data.input_key,
        label_key=own.eval_label_key or data.label_key,
        metadata_key=config.eval.own(name).metadata_key or data.metadata_key,
    )
