"""The fleet of SGLang servers: how many, on what, with which options. Owner: `models/engines/launch`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct


class SglangConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    sglang_python: Annotated[
        str | None,
        Meta(
            description="Python interpreter of the environment that SGLang is installed in; default: "
            ".venv-sglang/bin/python of the project (make sglang-env), else the one that runs Sluice"
        ),
    ] = None
    rollout_num_gpus: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="GPUs of all engines; default: one engine's worth for each of --scale engine=N"),
    ] = None
    rollout_num_gpus_per_engine: Annotated[
        int, Meta(ge=1, description="GPUs of one engine: its tensor parallel times its pipeline parallel size")
    ] = 1
    rollout_external_engine_addrs: Annotated[
        tuple[str, ...], Meta(description="engines that run already, as http://host:port; none is started then")
    ] = ()
    rollout_external_engine_token_file: Annotated[
        str | None,
        Meta(
            description="file (mode 0600) with the token of engines, router and frozen engines that run already: what "
            "SGLang was given as its api key"
        ),
    ] = None
    sglang_args: Annotated[
        dict[str, Any],
        Meta(description="options of the SGLang server by name; on the command line --sglang-<option> value"),
    ] = {}
