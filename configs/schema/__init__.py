"""The whole configuration as frozen structs. Field names are the names of the command-line flags.

Invariants: nothing here imports torch, zmq or ray; every field has a default and a description; unknown keys are
refused. Derived values (batch arithmetic, staleness bound) are filled in by `configs.resolve`, after all overrides.
"""

from __future__ import annotations

from typing import Literal

from configs.schema.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig, DistillConfig
from configs.schema.data import (
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    FilterConfig,
    RewardConfig,
    ToolsConfig,
    WarmStartConfig,
)
from configs.schema.notation import Section
from configs.schema.rollout import (
    AsyncConfig,
    EngineConfig,
    HealthConfig,
    RolloutConfig,
    RouterConfig,
    SglangConfig,
    UpdateConfig,
)
from configs.schema.run import (
    CheckpointConfig,
    DebugConfig,
    ModelConfig,
    ObserveConfig,
    RayConfig,
    RunConfig,
    StageConfig,
)
from configs.schema.train import FsdpConfig, LoraConfig, MegatronConfig, ParallelConfig, TrainConfig


class Config(Section, frozen=True, kw_only=True):
    run: RunConfig = RunConfig()
    ray: RayConfig = RayConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    sglang: SglangConfig = SglangConfig()
    router: RouterConfig = RouterConfig()
    health: HealthConfig = HealthConfig()
    update: UpdateConfig = UpdateConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    fsdp: FsdpConfig = FsdpConfig()
    lora: LoraConfig = LoraConfig()
    megatron: MegatronConfig = MegatronConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    correction: CorrectionConfig = CorrectionConfig()
    critic: CriticConfig = CriticConfig()
    distill: DistillConfig = DistillConfig()
    asynchrony: AsyncConfig = AsyncConfig()
    reward: RewardConfig = RewardConfig()
    filter: FilterConfig = FilterConfig()
    tools: ToolsConfig = ToolsConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    debug: DebugConfig = DebugConfig()
    stage: tuple[StageConfig, ...] = ()
    """custom stages, as a list of tables"""
    environment: tuple[EnvironmentConfig, ...] = ()
    """environments of the rollouts, as a list of tables"""


def generates(config: Config) -> bool:
    """Whether the run has engines: supervised training and saved batches need none."""
    return config.train.loss_type != "sft_loss" and config.debug.load_debug_rollout_data is None


def served_checkpoint(config: Config) -> str:
    """The checkpoint with which engines that generate begin, and in whose types they get all weights."""
    return config.engine.engine_checkpoint or config.train.hf_checkpoint


def router_kind(config: Config) -> Literal["none", "sglang", "smg"]:
    """Which router stands in front of the engines that generate, with `auto` decided. Without engines there is none.

    With `--router-address` it is one that runs already; of a kind that nothing names it is taken for sglang-router.
    """
    router = config.router
    if not generates(config):
        return "none"
    if router.router != "auto":
        return router.router
    return "sglang" if config.engine.engine == "sglang" or router.router_address is not None else "none"
