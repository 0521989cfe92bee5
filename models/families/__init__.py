"""Families of models: their architecture out of `config.json`, and their weights' names in Megatron-core and back.

One small file per family declares it; `registry.architecture_of` picks it. Nothing here imports Megatron-core.
"""
