"""A lane is how requests and replies are written: one pair for the server's end, one for the
client's. Nothing else of a command, a connection or a call depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pion_server.wire.encode import Argument, encode_reply, encode_request
from pion_server.wire.fast_encode import encode_fast_reply, encode_fast_request
from pion_server.wire.fast_replies import FastReplyDecoder
from pion_server.wire.fast_requests import FastRequestDecoder
from pion_server.wire.limits import Limits
from pion_server.wire.receive import RequestReceiver
from pion_server.wire.replies import ReplyDecoder
from pion_server.wire.requests import RequestDecoder
from pion_server.wire.values import Payload, Reply


@dataclass(frozen=True, slots=True)
class Lane:
    """`encode_reply` takes the RESP version that the client has chosen."""

    requests: Callable[[Limits], RequestReceiver]
    encode_reply: Callable[[Reply, int], Iterator[Payload]]
    encode_request: Callable[[Sequence[Argument]], list[Payload]]
    replies: Callable[[Limits], ReplyDecoder]


RESP = Lane(RequestDecoder, encode_reply, encode_request, ReplyDecoder)
FAST = Lane(FastRequestDecoder, encode_fast_reply, encode_fast_request, FastReplyDecoder)
