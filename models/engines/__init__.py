"""Inference engines behind one seam: SGLang's HTTP protocol.

`client` and `protocol` are what a generate stage imports (no torch); `serve` starts one of two servers of the same
protocol, `embedded` (a torch model with continuous batching) or `simulated` (a latency model). A real SGLang server
is the third, and needs nothing from here but the client.
"""
