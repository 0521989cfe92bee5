"""The errors of transport, as one tree. Every message names the key, the value, the rule and the cure in one sentence.

    TransportError
    ├── AddressError            an address that cannot be used
    │   ├── AddressInvalid      does not parse, path too long, directory readable by others
    │   ├── AddressRefused      would be open to the network without keys
    │   └── AddressInUse        another socket is bound there
    ├── SecurityError           keys missing, malformed or readable by others
    ├── MessageTooLarge         a message that cannot be sent
    ├── MessageInvalid          does not encode, or its key is unusable
    ├── DecodeError             a body that is not of its schema; never raised into a stage, ends in quarantine
    ├── LinkError               the peer or the hub
    │   ├── LinkRefused         it answered REFUSE: protocol, run, stream or schema differ
    │   ├── LinkLost            it has been silent for longer than give_up_s
    │   ├── StreamFinished      the stream has ended, nothing more is accepted
    │   └── BlobGone            the blob is not served any more, or anew
    └── UsageError              closed node or port, forked process, lease settled twice, unusable schema or spec

All take one string, so that they survive being sent between processes by a runner.
"""

from __future__ import annotations


class TransportError(Exception):
    """Root of the tree."""


class AddressError(TransportError):
    """An address that cannot be used."""


class AddressInvalid(AddressError):
    """The address does not parse, or its place in the file system is unfit."""


class AddressRefused(AddressError):
    """The address would be reachable from the network without keys."""


class AddressInUse(AddressError):
    """Another socket is bound to the address."""


class SecurityError(TransportError):
    """Keys are missing, malformed or readable by others."""


class MessageTooLarge(TransportError, ValueError):
    """The encoded body exceeds the stream's max_message_bytes. A ValueError too, as `stages.ports.Outlet` promises."""


class MessageInvalid(TransportError):
    """The message does not encode as its schema, or its key is unusable."""


class DecodeError(TransportError):
    """The body is damaged or not of its schema."""


class LinkError(TransportError):
    """Something is wrong with the peer or the hub."""


class LinkRefused(LinkError):
    """The hub or server refused this peer."""


class LinkLost(LinkError):
    """The hub or server has been silent for longer than give_up_s."""


class StreamFinished(LinkError):
    """The stream has ended."""


class BlobGone(LinkError):
    """The blob is not served (any more), or another one under its name."""


class UsageError(TransportError):
    """The caller broke a rule of this package."""
