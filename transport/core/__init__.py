"""The protocol as state machines: no I/O, no clock, no randomness, no asyncio.

Each machine is fed by `on_message(now, ...)` and `on_timer(now)`, gives what it wants sent by `flush(now)`, and says by
`deadline()` when it wants its timer. The shells drive them with sockets, the tests with virtual time.
"""
