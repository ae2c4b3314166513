"""Attention of prefixes at a pion-server: what is asked of it, over which connections.

A server keeps attention state of the prefix `<ns>` under the session id `<ns>_attn`, a layer for
each layer that rows are kept of, K and V as fp32 (H_kv, N, D). State may become cold; then the
server makes it anew of the rows of `<ns>`, in the precision that these are stored in.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from pion_server.client import Call, calls
from pion_server.errors import ColdMiss, PionError
from pion_vllm_mlx.remote import Remote
from pion_vllm_mlx.stats import Stats

# How the server says that it has no such state, after a restart for one.
NOT_FOUND = "session not found"


@dataclass(frozen=True, slots=True)
class Target:
    """The attention state of a prefix: `layers` of `heads` K/V heads of `dim` values."""

    namespace: str
    layers: int
    heads: int
    dim: int

    @property
    def sid(self) -> str:
        """The session id."""
        return f"{self.namespace}_attn"

    def lookups(self) -> list[Call[Any]]:
        """Whether each layer can be queried."""
        return [calls.attend_lookup(self.sid, layer) for layer in range(self.layers)]

    def warm(self) -> Call[Any]:
        """Make it of the rows that are stored."""
        return calls.prefix_warm(self.namespace, self.heads, self.dim, self.sid)


@dataclass(frozen=True)
class State:
    """What a prefill left for a target: K and V of every layer."""

    target: Target
    sides: list[Any]

    @classmethod
    def of(cls, target: Target, sides: Sequence[mx.array]) -> State:
        """`sides` are K and V of layer 0, of layer 1, ..., each (1, H, N, D). Evaluates them, so
        use it on the thread that computed them."""
        whole = [mx.contiguous(side[0].astype(mx.float32)) for side in sides]
        mx.eval(whole)
        return cls(target, [np.asarray(side) for side in whole])  # no copy

    @property
    def nbytes(self) -> int:
        """Bytes of all sides."""
        return sum(side.nbytes for side in self.sides)

    def stores(self) -> list[Call[Any]]:
        """What has the server keep it."""
        pairs = zip(self.sides[::2], self.sides[1::2], strict=True)
        return [calls.attend_store(self.target.sid, i, *pair) for i, pair in enumerate(pairs)]


class Lane:
    """The way to one server. Everything raises Unavailable."""

    def __init__(self, remote: Remote, stats: Stats) -> None:
        self._remote = remote
        self._timeout = remote.timeout
        self._stats = stats

    def ask(self, target: Target, requests: Sequence[Call[Any]]) -> list[Any]:
        """The values of queries, sent as one. Where state is cold it is made warm, and they are
        sent again, once."""
        start = time.perf_counter()
        with self._remote.guard():
            try:
                values = self._remote.read(requests, self._timeout)
            except PionError as error:
                if not (isinstance(error, ColdMiss) or str(error).startswith(NOT_FOUND)):
                    raise
                self._remote.read([target.warm()], self._timeout)
                self._stats.add(cold_rehydrates=1)
                values = self._remote.read(requests, self._timeout)
        seconds = time.perf_counter() - start
        self._stats.add(attend_calls=len(requests), attend_ms_total=seconds * 1e3)
        return values

    def ready(self, target: Target) -> bool:
        """Whether all layers can be queried as they are."""
        with self._remote.guard():
            states = self._remote.read(target.lookups(), self._timeout)
        return set(states) == {"HIT"}

    def prepare(self, target: Target) -> None:
        """Have all layers warm."""
        if not self.ready(target):
            with self._remote.guard():
                self._remote.read([target.warm()], self._timeout)

    def push(self, state: State) -> None:
        """Have the server keep `state`, over a connection that no query waits for."""
        with self._remote.guard():
            for call in state.stores():  # each in its own time: the whole may be gigabytes
                self._remote.write([call])
