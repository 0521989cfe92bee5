"""Parts of a run alone, rollout batches kept on disk, faults on purpose. Owners: `stages/train/saved_batches`,
`models/fault_injection`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

if TYPE_CHECKING:
    from configs.schema import Config


class DebugConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    save_debug_rollout_data: Annotated[
        str | None,
        Meta(description="write every rollout batch whole to this file; {rollout_id} is its number, from 0"),
    ] = None
    load_debug_rollout_data: Annotated[
        str | None,
        Meta(description="train on the batches of such files, without engines and rewards"),
    ] = None
    debug_train_only: Annotated[
        bool, Meta(description="start no engine; needs --load-debug-rollout-data or --loss-type sft_loss")
    ] = False
    debug_rollout_only: Annotated[
        bool, Meta(description="generate and grade, but train nothing: every version has the weights of the start")
    ] = False
    fault_inject: Annotated[
        tuple[str, ...],
        Meta(
            description="disturb a stage, engine or rank on purpose, as stage:probability:kind, e.g. reward:0.01:kill; "
            "kinds: kill, error, hang, slow, for engine also drop; repeatable"
        ),
    ] = ()


def generates(config: Config) -> bool:
    """Whether the run has engines: supervised training and saved batches need none."""
    return config.train.loss_type != "sft_loss" and config.debug.load_debug_rollout_data is None


def batch_file(template: str, rollout_id: int) -> str:
    """Where batch `rollout_id` (0 = the first) lies. Raises ValueError for a template that names something else."""
    try:
        return template.format(rollout_id=rollout_id)
    except (KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"the only name in braces is {{rollout_id}}, not {error}") from error
