"""SSM.PREFIX.*: recurrent states of prefixes, by layer. Opaque blobs of any size."""

from __future__ import annotations

from pion_server.client.buffers import Buffer
from pion_server.client.calls.base import Call, Name, bulk, done, received_into, words
from pion_server.wire.values import Reply


def ssm_store(sid: Name, layer: int, blob: Buffer) -> Call[None]:
    """Keep a layer's state, in the place of one that is there. Sent without a copy. Where `sid` is
    a namespace, its states go when that goes."""
    return Call(words("SSM.PREFIX.STORE", sid, layer, blob), done)


def ssm_fetch(sid: Name, layer: int, *, into: Buffer | None = None) -> Call[memoryview | None]:
    """A layer's state, received into `into` where it is given (its size must be the state's), or
    None."""
    parse, sink = received_into(into, _blob)
    return Call(words("SSM.PREFIX.FETCH", sid, layer), parse, sink)


def _blob(reply: Reply) -> memoryview | None:
    return None if reply is None else memoryview(bulk(reply))


def ssm_drop(sid: Name, layer: int | None = None) -> Call[None]:
    """Free the state of one layer, or those of all."""
    return Call(words("SSM.PREFIX.DROP", sid, *(() if layer is None else (layer,))), done)
