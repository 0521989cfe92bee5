"""A server of the Model Context Protocol for the tests: over stdio, or with an argument PORT over HTTP."""

from __future__ import annotations

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("test")
total = 0


@server.tool()
def add(number: int) -> int:
    """Add to the sum, and answer with it."""
    global total
    total += number
    return total


@server.tool()
def fail(why: str) -> str:
    """Raise an exception."""
    raise ValueError(why)


@server.tool()
def sleep(seconds: float) -> str:
    """Take long."""
    time.sleep(seconds)
    return "slept"


@server.tool()
def say(length: int, letter: str = "x") -> str:
    """A long answer."""
    return letter * length


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
