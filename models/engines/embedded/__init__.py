"""A small inference engine on torch modules' weights: continuous batching over a static KV cache, in place weight swap.

`spec` and `weights` read Hugging Face checkpoints, `transformer` is the functional forward, `kv_cache` and `slots` hold
what runs, `sampling` draws tokens, `stepper` is one step of continuous batching (no thread), `engine` the thread.
"""
