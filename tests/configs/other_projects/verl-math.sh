# As run_qwen2-7b_math.sh and run_qwen2_5-3b_gsm8k_grpo_lora.sh of examples/grpo_trainer.
train=/data/math/train.parquet
both="['/data/gsm8k/train.parquet', '$train']"
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo data.train_files="$both" data.val_files=/data/gsm8k/test.parquet \
    data.train_batch_size=64 data.max_prompt_length=100 data.max_response_length=200 \
    data.filter_overlong_prompts=True data.truncation='error' data.prompt_key=messages data.shuffle=False \
    actor_rollout_ref.model.path=tiny actor_rollout_ref.model.use_shm=True \
    actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.lora_alpha=16 \
    actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.layered_summon=True \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False \
    trainer.critic_warmup=0 trainer.logger=['console','wandb'] trainer.project_name='mine' \
    trainer.experiment_name='first' trainer.n_gpus_per_node=4 trainer.nnodes=1 trainer.save_freq=20 \
    trainer.test_freq=5 trainer.total_epochs=3 $@
