"""A published model by name: its dimensions for `--dry-run`, and a suggested layout. Owner: `configs/models`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: Annotated[
        str | None,
        Meta(description="preset of configs/models: published dimensions, and a suggested parallel layout"),
    ] = None
    architecture: Annotated[
        dict[str, Any], Meta(description="Hugging Face config.json of that model, for estimates and for the check")
    ] = {}
