"""Options of the server and of the router that are not the user's to pass on, each with the reason and the cure.

Invariant: what stands here is either set by Sluice from a flag of its own, or would break what Sluice relies on. Names
are those that the option is first written with, in the installed version's own list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_CHECKPOINT = "Sluice serves the checkpoint that it trains; use --hf-checkpoint"
_LOOPBACK = "Sluice chooses where engines listen: on the loopback address unless the run has other hosts; leave it out"
_PARALLEL = "it follows from --rollout-num-gpus-per-engine (divided by --sglang-pp-size); use that"
_NODES = "an engine that Sluice starts stays on one machine; leave it out"
_PROTOCOL = "the generate stage speaks plain HTTP with JSON; leave it out"
_KEYS = "each run makes a token of its own, which no command line shows; leave it out"
_VERSION = "versions of the weights are the trainer's to give; leave it out"

SERVER_RESERVED: Final[Mapping[str, str]] = {
    "model-path": _CHECKPOINT,
    "load-format": "an update would be loaded in that format too, but Sluice writes safetensors; leave it out",
    "weight-version": _VERSION,
    "host": _LOOPBACK,
    "port": "use --engine-port",
    "tp-size": _PARALLEL,
    "dp-size": "a replica is an engine here, so that its weights are updated alone; raise --rollout-num-gpus",
    "nnodes": _NODES,
    "node-rank": _NODES,
    "dist-init-addr": _NODES,
    "base-gpu-id": "each engine sees its own GPUs only; leave it out",
    "gpu-id-step": "each engine sees its own GPUs only; leave it out",
    "context-length": "use --rollout-max-context-len",
    "random-seed": "use --seed",
    "stream-interval": "use --stream-interval, which the generate stage reads too",
    "incremental-streaming-output": "it follows from --stream-interval; use that",
    "skip-tokenizer-init": "samples carry their text, and stop strings need it; leave it out",
    "is-embedding": "an engine must generate; leave it out",
    "api-key": _KEYS,
    "admin-api-key": _KEYS,
    "ssl-keyfile": _PROTOCOL,
    "ssl-certfile": _PROTOCOL,
    "grpc-mode": _PROTOCOL,
    "smg-grpc-mode": _PROTOCOL,
    "fastapi-root-path": _PROTOCOL,
    "use-ray": "Sluice starts and ends the processes of an engine itself; leave it out",
    "config": "a file of options would get round their check; give them one by one",
}

_RETRIES = "the generate stage alone repeats a request, from its partial output; see --max-retries, and leave it out"
_WORKERS = "Sluice adds an engine when it carries the published weights, and takes it out when it is lost; leave it out"

ROUTER_RESERVED: Final[Mapping[str, str]] = {
    "host": "the router answers on the loopback address only; leave it out",
    "port": "Sluice chooses a free port and announces it; leave it out",
    "worker-urls": _WORKERS,
    "service-discovery": _WORKERS,
    "policy": "use --router-policy",
    "prometheus-port": "Sluice chooses a free port and collects the metrics; leave it out",
    "prometheus-host": "the metrics are collected over the loopback address; leave it out",
    "disable-retries": "it is always given; leave it out",
    "retry-max-retries": _RETRIES,
    "retry-initial-backoff-ms": _RETRIES,
    "retry-max-backoff-ms": _RETRIES,
    "retry-backoff-multiplier": _RETRIES,
    "retry-jitter-factor": _RETRIES,
    "backend": "the engines are SGLang's; leave it out",
    "api-key": _KEYS,
    "tenant-api-key": _KEYS,
    "control-plane-api-keys": _KEYS,
    "tls-cert-path": _PROTOCOL,
    "tls-key-path": _PROTOCOL,
    "mini-lb": "it is for debugging and lacks the workers' interface that Sluice uses; leave it out",
    "remove-unhealthy-workers": _WORKERS,
}
