"""Inference engines behind one seam: SGLang's HTTP protocol.

A generate stage imports `client` and `protocol` (no torch). `serve` starts a server of the same protocol: `embedded` (a
torch model with continuous batching) or `simulated` (a latency model). Real SGLang servers need only `launch`.
"""
