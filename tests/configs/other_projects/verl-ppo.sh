# As examples/ppo_trainer/run_qwen2-7b_seq_balance.sh and grpo_trainer/run_qwen2-7b_seq_balance.sh.
mode="async"
if [ "$mode" = "async" ]; then raw=True; fi
python3 -m verl.trainer.main_ppo \
    data.train_files=$HOME/train.parquet data.val_files=$HOME/test.parquet data.return_raw_chat=$raw \
    data.train_batch_size=512 data.val_batch_size=13 data.max_prompt_length=64 data.max_response_length=64 \
    actor_rollout_ref.model.path=tiny actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000 \
    actor_rollout_ref.actor.fsdp_config.grad_offload=False actor_rollout_ref.rollout.mode=$mode \
    actor_rollout_ref.rollout.multi_turn.format=hermes actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.log_prob_micro_batch_size=256 actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    critic.optim.lr=2e-5 critic.model.use_remove_padding=True critic.model.path=/models/critic \
    critic.model.enable_gradient_checkpointing=True critic.ppo_micro_batch_size=256 \
    critic.model.fsdp_config.param_offload=False algorithm.kl_ctrl.kl_coef=0.003 algorithm.use_kl_in_reward=True \
    trainer.logger=['console'] trainer.project_name=mine trainer.n_gpus_per_node=2 +trainer.val_before_train=False \
    trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=2
