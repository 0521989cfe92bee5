"""A small inference engine on torch: continuous batching over a static KV cache, weights swapped in place.

`transformer` reads checkpoints and is the functional forward, `kv_cache` holds what runs, `batch` prefills and draws
tokens, `stepper` is one step of continuous batching (no thread), `engine` the thread.
"""
