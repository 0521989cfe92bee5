"""Training with Megatron-core. Only what runs it imports it."""
