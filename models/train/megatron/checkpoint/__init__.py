"""Checkpoints of Megatron models, saved from one parallel layout and loaded into any other."""
