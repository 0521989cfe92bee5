"""What can be wrong before a server is started.

    EngineStartError
    └── LaunchError               base of what this package raises
        ├── EnvironmentMissing    no interpreter there, or SGLang or the router is not installed in it
        ├── EnvironmentBroken     it is installed, but does not import
        └── LaunchRefused         the configuration asks for a server that this environment cannot run

Invariant: as in `models.engines.errors`, every error is one sentence with its cure, and survives pickling.
"""

from __future__ import annotations

from models.engines.errors import EngineStartError


class LaunchError(EngineStartError):
    """A server or router cannot be started with this environment or these options."""


class EnvironmentMissing(LaunchError):
    """There is no environment to start it in."""


class EnvironmentBroken(LaunchError):
    """What is installed in the environment cannot be imported."""


class LaunchRefused(LaunchError):
    """The options contradict each other or the machine."""
