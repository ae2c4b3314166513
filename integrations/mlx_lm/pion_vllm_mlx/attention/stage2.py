"""What a PionPromptCache with `stage2` has: prefixes in the process, attention state at the server.

A prefix that was prefilled or restored in this process stays in it (held.py), within a budget in
bytes, and is continued from there. Elsewhere it is attended to at the server (wire.py), which was
given its attention state when it was prefilled. There, only what is large stays away: recurrent
states and sliding windows are fetched, as they are when a prefix is restored.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import mlx.core as mx

from pion_server.client import Call, calls
from pion_server.errors import Mismatch
from pion_vllm_mlx.attention.held import Held, Shelf
from pion_vllm_mlx.attention.hook import is_installed
from pion_vllm_mlx.attention.lane import Lane, State, Target
from pion_vllm_mlx.attention.reach import check_reach, suffixed
from pion_vllm_mlx.attention.sparse import Sparse, SparseCache
from pion_vllm_mlx.attention.suffix import SuffixCache, UnsupportedAttentionError
from pion_vllm_mlx.attention.wire import SparseWireCache, WireCache, WirePrefix
from pion_vllm_mlx.caches import Part
from pion_vllm_mlx.contents import fill_states, rows_of
from pion_vllm_mlx.layout import Layout
from pion_vllm_mlx.model import Cache, Model
from pion_vllm_mlx.remote import Remote, Unavailable

# Set to 1, prefixes are not kept in the process: to see what other processes will see.
NO_INPROC = "PION_PROMPT_CACHE_NO_INPROC"
# Prefixes whose token ids are remembered, to prefill them again if the server goes away.
MAX_KNOWN = 1024


class PrefixUnavailableError(Exception):
    """There is no such prefix to continue, or another one of that name."""


class Prefix(NamedTuple):
    """What a caller of get_or_prefill asks for."""

    namespace: str
    token_ids: Sequence[int]
    fingerprint: str


class Stage2:
    """Of one model. `remote` is where its rows are; `lane` where its attention is computed."""

    def __init__(
        self,
        model: Model,
        empty: Callable[[], list[Cache]],
        layout: Layout,
        remote: Remote,
        lane: Lane,
        budget: int,
    ) -> None:
        self._model = model
        self._empty = empty
        self._layout = layout
        self._remote = remote
        self._lane = lane
        # The specification's name: prefixes in the process, by namespace.
        self._mlx_prefix_kv = Shelf(budget)
        self._known: OrderedDict[str, Prefix] = OrderedDict()
        self._sinks: bool | None = None  # None until the model's attention was looked at

    def recall(self, prefix: Prefix) -> list[Cache] | None:
        """Caches of a prefix that is held in the process."""
        self.remember(prefix)
        held = self._held(prefix.namespace)
        return None if held is None else held.caches(self._empty())

    def remember(self, prefix: Prefix) -> None:
        """What a namespace stands for: checked from now on, and prefilled if all else fails."""
        self._known[prefix.namespace] = prefix
        self._known.move_to_end(prefix.namespace)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def keep(self, prefix: Prefix, caches: list[Cache]) -> list[Cache]:
        """Hold a prefix; what to hand out in the place of `caches`, which have just been made."""
        if not _in_process():
            return caches
        held = Held(caches, len(prefix.token_ids), prefix.fingerprint)
        self._mlx_prefix_kv.put(prefix.namespace, held)
        return held.caches(self._empty())

    def state(self, namespace: str, sides: Sequence[mx.array]) -> State | None:
        """The attention state of a prefix with these rows; None where it could not be used."""
        target = self._target(namespace)
        return None if target is None else State.of(target, sides)

    def push(self, state: State) -> None:
        """Have the server keep a prefix's attention state. Never raises."""
        with suppress(Unavailable):
            self._lane.push(state)

    def ready(self, namespace: str) -> bool:
        """Whether the server can be queried about this prefix. Raises Unavailable."""
        target = self._target(namespace)
        return target is not None and self._lane.ready(target)

    def held(self, namespace: str, tokens: int, sparse: Sparse | None) -> list[Cache] | None:
        """Caches that continue a prefix in this process; None where it is not held."""
        held = self._held(namespace)
        if held is None:
            return None
        if held.tokens != tokens:
            raise PrefixUnavailableError(f"{namespace} has {held.tokens} tokens, not {tokens}")
        if sparse is None:
            return held.caches(self._empty())
        self._reach()
        return held.caches(self._empty(), lambda rows: SparseCache(rows, sparse))

    def at_server(
        self,
        namespace: str,
        tokens: int,
        sparse: Sparse | None,
        obtain: Callable[[Prefix], list[Cache]],
    ) -> list[Cache]:
        """Caches that continue a prefix at the server. `obtain` gives plain ones if that fails."""
        target, sinks = self._target(namespace), self._reach()
        if target is None:
            raise UnsupportedAttentionError(
                "a server computes attention of layers that keep rows, all with the same number of "
                "heads, and as many values in K as in V, which this model has not; its prefixes "
                "can be restored with get_or_prefill"
            )
        if sinks and sparse is not None:
            raise UnsupportedAttentionError("a server's sparse attention knows no sinks")

        def recover() -> list[mx.array]:
            known = self._known.get(namespace)
            if known is None:
                raise PrefixUnavailableError(
                    f"the server failed, and nobody said which tokens {namespace} stands for: "
                    "start again with get_or_prefill"
                )
            return rows_of(obtain(known), self._layout, Part.ROWS)

        prefix = WirePrefix(self._lane, target, tokens, recover)

        def cache(layer: int) -> SuffixCache:
            if sparse is None:
                return WireCache(prefix, layer)
            return SparseWireCache(prefix, layer, sparse)

        return suffixed(self._local(target, tokens), self._layout, cache)

    def _held(self, namespace: str) -> Held | None:
        held = self._mlx_prefix_kv.get(namespace) if _in_process() else None
        known = self._known.get(namespace)
        if held is None or (known is not None and known.fingerprint != held.fingerprint):
            return None
        return held

    def _local(self, target: Target, tokens: int) -> list[Cache]:
        """Caches with what is not at the server: states and windows. Everything there is warm."""
        namespace = target.namespace
        known = self._known.get(namespace)
        fingerprint = None if known is None else known.fingerprint
        requests: list[Call[Any]] = [
            calls.prefix_lookup(namespace, tokens=tokens, fingerprint=fingerprint),
            # One row says how many there are.
            calls.prefix_fetch(
                namespace, layers=(0, 1), rows=(0, 1), fmt="NATIVE", fingerprint=fingerprint
            ),
            *(calls.ssm_fetch(namespace, leaf) for leaf in self._layout.states),
        ]
        caches = self._empty()
        try:
            with self._remote.guard():
                _, rows, *states = self._remote.read(requests, self._remote.timeout)
                if rows is None or None in states:
                    raise Mismatch(f"no complete prefix is stored under {namespace}")
                if rows.tokens != tokens:
                    raise Mismatch(f"{namespace} has {rows.tokens} tokens, not {tokens}")
                fill_states(caches, self._layout, states)
            self._lane.prepare(target)
        except Unavailable as error:
            why = error.__cause__ or "the server failed a moment ago"
            raise PrefixUnavailableError(
                f"{namespace} cannot be continued ({why}): call get_or_prefill first"
            ) from error
        return caches

    def _target(self, namespace: str) -> Target | None:
        formats = self._layout.rows.formats
        shapes = {(fmt.heads, fmt.width) for fmt in formats}
        if len(shapes) != 1:
            return None
        ((heads, width),) = shapes
        return Target(namespace, len(formats) // 2, heads, width)

    def _reach(self) -> bool:
        """Whether attention has sinks. Raises where it cannot be reached."""
        if not is_installed():
            raise RuntimeError(
                "mlx-lm's attention is not patched: call install_pion_attention_patch() first"
            )
        if self._sinks is None:
            self._sinks = check_reach(self._model, self._empty(), self._layout)
        return self._sinks


def _in_process() -> bool:
    return os.environ.get(NO_INPROC) != "1"
