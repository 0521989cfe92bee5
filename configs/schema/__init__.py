"""The whole configuration as frozen structs. Field names are the names of the command-line flags.

Invariants: nothing here imports torch, zmq or ray; every field has a default and a description; unknown keys are
refused. Derived values (batch arithmetic, staleness bound) are filled in by `configs.resolve`, after all overrides.
"""

from __future__ import annotations

from msgspec import Struct

from configs.schema.algorithm import AlgorithmConfig
from configs.schema.asynchrony import AsyncConfig
from configs.schema.correction import CorrectionConfig
from configs.schema.critic import CriticConfig
from configs.schema.data import DataConfig
from configs.schema.debug import DebugConfig
from configs.schema.distill import DistillConfig
from configs.schema.engine import EngineConfig, SimulatedEngineConfig
from configs.schema.environment import EnvironmentConfig
from configs.schema.evaluation import EvalConfig
from configs.schema.fsdp import FsdpConfig, LoraConfig
from configs.schema.health import HealthConfig
from configs.schema.megatron import MegatronConfig
from configs.schema.parallel import ParallelConfig
from configs.schema.presets import ModelConfig
from configs.schema.ray import RayConfig
from configs.schema.reward import FilterConfig, RewardConfig, ToolsConfig
from configs.schema.rollout import RolloutConfig
from configs.schema.router import RouterConfig
from configs.schema.run import CheckpointConfig, ObserveConfig, RunConfig, StageConfig, WarmStartConfig
from configs.schema.sglang import SglangConfig
from configs.schema.train import TrainConfig
from configs.schema.update import UpdateConfig

__all__ = [
    "AlgorithmConfig",
    "AsyncConfig",
    "CheckpointConfig",
    "Config",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "DebugConfig",
    "DistillConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "FilterConfig",
    "FsdpConfig",
    "HealthConfig",
    "LoraConfig",
    "MegatronConfig",
    "ModelConfig",
    "ObserveConfig",
    "ParallelConfig",
    "RayConfig",
    "RewardConfig",
    "RolloutConfig",
    "RouterConfig",
    "RunConfig",
    "SglangConfig",
    "SimulatedEngineConfig",
    "StageConfig",
    "ToolsConfig",
    "TrainConfig",
    "UpdateConfig",
    "WarmStartConfig",
]


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
    environment: tuple[EnvironmentConfig, ...] = ()
