# As recipe/dapo/run_dapo_qwen2.5_32b.sh.
prompts=96
long=$((256 * 4))
ray job submit --no-wait -- python3 -m recipe.dapo.src.main_dapo \
    data.train_files="/data/dapo.parquet" data.val_files="/data/aime.parquet" data.prompt_key=prompt \
    data.truncation='left' data.max_prompt_length=128 data.max_response_length=${long} \
    data.gen_batch_size=$((prompts * 3)) data.train_batch_size=${prompts} actor_rollout_ref.rollout.n=8 \
    algorithm.adv_estimator=grpo algorithm.kl_ctrl.kl_coef=0.0 actor_rollout_ref.actor.kl_loss_coef=0.0 \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 \
    algorithm.filter_groups.metric=acc actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2000 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=2000 actor_rollout_ref.model.path="tiny" \
    +actor_rollout_ref.model.override_config.attention_dropout=0. \
    +actor_rollout_ref.model.override_config.embd_pdrop=0. actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.actor.grad_clip=1.0 \
    actor_rollout_ref.actor.use_token_level_loss=True actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.rollout.enable_chunked_prefill=True actor_rollout_ref.rollout.max_num_batched_tokens=2000 \
    actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k="-1" \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.7 actor_rollout_ref.rollout.val_kwargs.top_p=0.9 \
    actor_rollout_ref.rollout.val_kwargs.top_k=-1 actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.n=1 actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 \
    reward_model.reward_manager=dapo custom_reward_function.overlong_buffer.enable=True \
    custom_reward_function.overlong_buffer.len=100 custom_reward_function.overlong_buffer.penalty_factor=0.5 \
    trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.test_freq=5 trainer.save_freq=5 trainer.total_epochs=1 \
    trainer.default_local_dir="/runs/dapo" trainer.resume_mode=auto
