"""What Megatron-core is told: its dataclasses out of the model's config.json and the options of a run."""
