"""Importing this loads Megatron, with its replacements: once, in the process from which trainer groups are forked."""

from models.train.megatron.processes import install_shim, install_shim_after_import

install_shim()

from models.train.megatron import build, checkpoint, models, parameters, weights  # noqa: E402, F401

install_shim_after_import()
