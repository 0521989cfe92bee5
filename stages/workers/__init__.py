"""Processes for code that may hang, crash or grow: one mechanism for graders, tools and environments.

`process` starts a worker and calls it. `serve` answers the calls inside the worker. `guard` ends a worker with its
parent, together with everything the worker started.
"""
