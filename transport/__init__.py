"""How typed messages move between stages: streams with credit and leases, a latest-value topic, bytes by name.

Knows no stage and no tensor. Start at `Node`; `transport.core` has the protocol itself, as state
machines without I/O, clock, randomness or asyncio. Each machine is fed by `on_message(now, ...)` and `on_timer(now)`,
gives what it wants sent by `flush(now)`, and says by `deadline()` when it wants its timer. The shells drive them with
sockets, the tests with virtual time.

Glossary
    chain        neighbouring stages of one process, whose streams are calls (transport/chain.py)
    stream       one edge of the graph: producers send, consumers receive
    hub          the server of one stream, in the controller's process
    custody      a hub's promise to keep a message from ACCEPTED to its verdict
    lease        a message that is handed to one consumer until its verdict
    verdict      done, poison (dead letter) or returned (to be delivered again); done and poison settle a message
    credit       how much a peer may still send, in items and bytes, as absolute counters
    window       how much a consumer may hold
    beat         a peer's periodic message; a consumer's beat lists all that it holds
    epoch        number of a hub's incarnation; a session is that of one peer within it
    incarnation  name of one life of a peer; replica is its name over all lives
    topic        newest value of each key, shared by all processes of a run
"""

from transport.awake import awake_clock as awake_clock
from transport.byte_transfer import ByteClient as ByteClient
from transport.byte_transfer import ByteServer as ByteServer
from transport.chain import ChainLink as ChainLink
from transport.chain import EntryInlet as EntryInlet
from transport.errors import StreamFinished as StreamFinished
from transport.errors import TransportError as TransportError
from transport.node import Node as Node
from transport.spec import DeadLetter as DeadLetter
from transport.spec import Held as Held
from transport.spec import StreamSpec as StreamSpec
from transport.stream import Hub as Hub
from transport.stream import Inlet as Inlet
from transport.topic import TopicClient as TopicClient
from transport.topic import TopicServer as TopicServer
