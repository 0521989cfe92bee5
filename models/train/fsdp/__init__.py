"""Any Hugging Face causal language model, sharded over several processes (FSDP2, HSDP, DDP), with LoRA."""
