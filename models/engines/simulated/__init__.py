"""The simulated engine: a real server with a latency model in place of a model, for benchmarks and faults."""
