"""The configurations of a run's phases, made from that of the run. Pure."""

from __future__ import annotations

from pathlib import Path

import msgspec

from configs.schema import Config
from configs.schema.debug import DebugConfig


def with_model(config: Config, model: Path) -> Config:
    """The configuration with another starting point; a reference or critic that had none of its own follows."""
    replace, start = msgspec.structs.replace, config.train.hf_checkpoint
    reference = str(model) if config.train.ref_load in (None, start) else config.train.ref_load
    critic = str(model) if config.critic.critic_load in (None, start) else config.critic.critic_load
    return replace(
        config,
        train=replace(config.train, hf_checkpoint=str(model), ref_load=reference),
        critic=replace(config.critic, critic_load=critic),
    )


def untrained(config: Config) -> Config:
    """The configuration with a trainer that takes no time and gives the weights of the start as every version."""
    replace = msgspec.structs.replace
    train = replace(config.train, train_backend="simulated", simulated_step_s=0.0)
    return replace(config, train=train, checkpoint=replace(config.checkpoint, save_interval=None))


def supervised(config: Config) -> Config:
    """The configuration of the warm start: the same machine with loss = sft and no engines."""
    replace = msgspec.structs.replace
    warm = config.warm_start
    return replace(
        config,
        data=replace(
            config.data,
            prompt_data=warm.warm_start_data or config.data.prompt_data,
            label_key=warm.warm_start_label_key or config.data.label_key,
            rollout_shuffle=True,
        ),
        rollout=replace(
            config.rollout,
            num_rollout=warm.warm_start_steps,
            num_epoch=None,
            rollout_batch_size=warm.warm_start_batch_size,
            n_samples_per_prompt=1,
        ),
        train=replace(
            config.train,
            loss_type="sft_loss",
            lr=warm.warm_start_lr,
            global_batch_size=warm.warm_start_batch_size,
            num_steps_per_rollout=1,
        ),
        asynchrony=replace(config.asynchrony, max_staleness=2, update_weights_interval=1),
        eval=replace(config.eval, eval_interval=None, eval_prompt_data=()),
        tools=replace(config.tools, tools=()),
        checkpoint=replace(config.checkpoint, save_interval=None),
        observe=replace(config.observe, use_tensorboard=False),
        debug=DebugConfig(),
        run=replace(config.run, scale={}),
        stage=(),
        environment=(),
    )
