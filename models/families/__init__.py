"""Families of models: their architecture out of `config.json`, and their weights' names in Megatron-core and back.

`registry.architecture_of` picks the family. Nothing here imports Megatron-core.
"""
