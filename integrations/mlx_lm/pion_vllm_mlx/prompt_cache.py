"""PionPromptCache: a shared prefix is prefilled once, in whichever process meets it first.

One round trip asks for the prefix and receives its rows; on a miss the model prefills here and the
rows are stored behind the request's back. Whatever goes wrong with Pion is a miss: the answer is
the same, only later.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import quote

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pion_server import DEFAULT_PORT
from pion_server.client import Call, calls
from pion_server.errors import DeadlineExceeded
from pion_vllm_mlx.attention.lane import Lane, State
from pion_vllm_mlx.attention.sparse import Sparse
from pion_vllm_mlx.attention.stage2 import Prefix, Stage2
from pion_vllm_mlx.background import Job
from pion_vllm_mlx.caches import Part, make_caches
from pion_vllm_mlx.connected import Connected
from pion_vllm_mlx.contents import fill, rows_of, states_of
from pion_vllm_mlx.entry import Entry, sealed
from pion_vllm_mlx.fingerprint import model_fingerprint, prefix_fingerprint
from pion_vllm_mlx.layout import SEAL, read_layout
from pion_vllm_mlx.model import Cache, Model, UnsupportedCacheError
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.remote import Remote, Unavailable
from pion_vllm_mlx.rows import Receiver, Span, to_rows

__all__ = ["PionPromptCache", "UnsupportedCacheError"]

INPROC_BYTES = 2 << 30


class PionPromptCache(Connected):
    """Prompt caches of one model, shared through a pion-server. Any model that mlx-lm runs.

    The server is on this machine's default port, or at `host` and `port`, or at `url`: over TLS
    `pions://[user:password@]host[:port]`, a Unix socket `pion+unix:///path` (client/url.py).
    `vquant` is how rows are stored: fp16 (the default), bf16, fp32, or `native`, the model's own
    dtype, with which a restored cache is bit-identical to the one that was stored; recurrent
    states and sliding windows always are. `timeout` (seconds) bounds what one request can lose to
    Pion; after a server could not be reached or timed out it is not asked again for a while.
    `kv_bits` and `kv_group_size` make quantized caches, as in mlx_lm.generate. Load adapters
    before: the model is fingerprinted here.

    With `stage2`, prefixes also stay in this process, `inproc_bytes` of them at most, and at the
    server as attention state, which other processes query: see make_pion_prompt_cache. Queries go
    to `attention_url`, such as pion+fast://host:1975; where the rows go, unless it is named.

    Use an instance from the thread that runs the model. Raises UnsupportedCacheError for a model
    with a class of cache that Pion does not know, ValueError for an unknown `vquant`, for `stage2`
    with quantized caches, or for `url` beside what it says itself, PionError for what is no URL.
    """

    def __init__(
        self,
        model: Model,
        host: str | None = None,
        port: int | None = None,
        vquant: str = "fp16",
        timeout: float = 5.0,
        username: str | None = None,
        password: str | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        stage2: bool = False,
        inproc_bytes: int = INPROC_BYTES,
        attention_url: str | None = None,
        *,
        url: str | None = None,
    ) -> None:
        if stage2 and kv_bits is not None:
            raise ValueError("attention over stored K/V needs them as they are: leave out kv_bits")
        url = _url(url, host=host, port=port, username=username, password=password)
        super().__init__(url, timeout)
        self._model = model
        self._make_caches = partial(make_caches, model, kv_bits, kv_group_size)
        self._layout = read_layout(model, self._make_caches(), vquant, blocks=False)
        self._rows = self._layout.rows if self._layout.rows.formats else SEAL
        self._model_fingerprint = model_fingerprint(model)
        self._stage2: Stage2 | None = None
        if stage2:
            self._remotes.append(Remote(attention_url or url, timeout, self._stats))
            queries = Lane(self._remotes[-1], self._stats)
            self._stage2 = Stage2(
                model, self._make_caches, self._layout, self._remote, queries, inproc_bytes
            )

    @staticmethod
    def make_namespace(*parts: str) -> str:
        """The first 32 hex digits of sha256 over the parts joined by `|`.

        The parts should name everything the K/V depend on (model, format, adapter, prompt). The
        fingerprint that is stored with the rows catches what they forget.
        """
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:32]

    def get_or_prefill(
        self, prefix_ids: Sequence[int] | npt.NDArray[Any] | mx.array, namespace: str
    ) -> list[Cache]:
        """Caches that hold exactly `prefix_ids`, for mlx-lm's `prompt_cache`; the caller's to keep.

        Raises ValueError where `prefix_ids` is empty or no flat list of ids, or `namespace` is
        empty; never because of Pion.
        """
        token_ids = _token_ids(prefix_ids)
        if not namespace:
            raise ValueError("namespace must not be empty; see make_namespace()")
        prefix = self._prefix(namespace, token_ids)
        if self._stage2 is None:
            return self._restored_or_prefilled(prefix)
        held = self._stage2.recall(prefix)
        if held is not None:
            self._stats.add(hits=1)
            return held
        return self._stage2.keep(prefix, self._restored_or_prefilled(prefix))

    def continued(
        self, namespace: str, tokens: int | Sequence[int], sparse: Sparse | None = None
    ) -> list[Cache]:
        """What make_pion_prompt_cache returns, and raises."""
        if self._stage2 is None:
            raise ValueError("this needs a PionPromptCache(..., stage2=True)")
        if not isinstance(tokens, int):
            token_ids = _token_ids(tokens)
            self._stage2.remember(self._prefix(namespace, token_ids))
            tokens = len(token_ids)
        caches = self._stage2.held(namespace, tokens, sparse)
        if caches is None:
            self._background.wait(self._timeout, namespace)  # it may still be on its way
            caches = self._stage2.at_server(namespace, tokens, sparse, self._obtain)
        self._stats.add(hits=1)
        return caches

    def serves(self, model: Model) -> bool:
        """Whether its prefixes are those of this model."""
        return model is self._model

    @property
    def cold_rehydrates_observed(self) -> int:
        """How often the server had to make attention state anew before it could answer a query."""
        return int(self._stats.as_dict()["cold_rehydrates"])

    def lookup(self, namespace: str) -> bool:
        """Whether the server holds a complete prefix under `namespace`; False where it is away.
        With `stage2`, whether its attention state can be queried, too.

        Of any model and any tokens: only get_or_prefill checks these.
        """
        try:
            with self._remote.guard():
                # MATCH, since a LOOKUP would enter a hit into the server's receipt.
                (hits,) = self._remote.read([calls.prefix_match([namespace])], self._timeout)
            return bool(hits) and (self._stage2 is None or self._stage2.ready(namespace))
        except Unavailable:
            return False

    def _prefix(self, namespace: str, token_ids: Sequence[int]) -> Prefix:
        words = self._layout.words()
        fingerprint = prefix_fingerprint(self._model_fingerprint, words, token_ids)
        return Prefix(namespace, token_ids, fingerprint)

    def _restored_or_prefilled(self, prefix: Prefix) -> list[Cache]:
        """Plain caches of a prefix. One that had to be prefilled is stored."""
        try:
            caches, answered = self._restore(*prefix), True
        except Unavailable:
            caches, answered = None, False
        if caches is not None:
            self._stats.add(hits=1)
            return caches
        start = time.perf_counter()
        caches = prefill(self._model, prefix.token_ids, self._make_caches())
        prefill_ms = (time.perf_counter() - start) * 1e3
        self._stats.add(misses=1, prefill_ms_total=prefill_ms)
        if answered:  # else the server is away, or the namespace is someone else's
            with suppress(Unavailable), self._remote.guard():
                self._store(caches, prefix, prefill_ms)
        return caches

    def _obtain(self, prefix: Prefix) -> list[Cache]:
        """Plain caches of a prefix whose attention the server has stopped computing."""
        with suppress(Unavailable):
            caches = self._restore(*prefix)
            if caches is not None:
                return caches
        return prefill(self._model, prefix.token_ids, self._make_caches())

    def _restore(
        self, namespace: str, token_ids: Sequence[int], fingerprint: str
    ) -> list[Cache] | None:
        """The caches from the server, None where it has no such prefix, or Unavailable."""
        start = time.perf_counter()
        tokens = len(token_ids)
        with self._remote.guard():
            receiver = Receiver(self._rows, [Span(namespace, tokens)])
            round_trip: list[Call[Any]] = [
                calls.prefix_lookup(namespace, tokens=tokens, fingerprint=fingerprint),
                *receiver.calls(fingerprint),
                *(calls.ssm_fetch(namespace, leaf) for leaf in self._layout.states),
            ]
            if not self._background.wait(self._timeout, namespace):
                raise DeadlineExceeded("this prefix is still being stored")
            left = self._timeout - (time.perf_counter() - start)
            _, rows, *states = self._remote.read(round_trip, max(left, 0.001))
            sides = receiver.receive([rows])
            if sides is None or None in states:
                return None
            caches = self._make_caches()
            fill(caches, self._layout, tokens, rows=sides, states=states)
        self._stats.add(
            bytes_fetched=receiver.nbytes + sum(map(len, states)),
            fetch_ms_total=(time.perf_counter() - start) * 1e3,
        )
        return caches

    def _store(self, caches: Sequence[Cache], prefix: Prefix, prefill_ms: float) -> None:
        """Hand the prefix to the background. It leaves the caches here, on the model's thread."""
        namespace, token_ids, fingerprint = prefix
        tokens = len(token_ids)
        if not self._background.has_room(tokens * self._layout.rows.token_bytes):
            self._stats.add(stores_dropped=1)
            return
        sides = rows_of(caches, self._layout, Part.ROWS)
        layout, rows = (self._rows, to_rows(sides, self._rows)) if sides else sealed(tokens)
        states = states_of(caches, self._layout)
        entry = Entry(namespace, tokens, fingerprint, layout, rows, states, prefill_ms)
        state = self._stage2.state(namespace, sides) if self._stage2 is not None else None
        nbytes = entry.nbytes + (0 if state is None else state.nbytes)
        send = partial(_send, self._remote, entry, self._stage2, state)
        if not self._background.submit(Job(namespace, nbytes, send)):
            self._stats.add(stores_dropped=1)


def _token_ids(prefix_ids: Any) -> list[int]:
    ids = np.asarray(prefix_ids)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise ValueError(
            f"prefix_ids must be a flat, non-empty list of token ids, got {ids.dtype} of shape "
            f"{ids.shape}"
        )
    return ids.tolist()  # type: ignore[no-any-return]


def _send(remote: Remote, entry: Entry, stage2: Stage2 | None, state: State | None) -> None:
    """On the storing thread. The attention state comes last: to store rows makes it cold."""
    if remote.store(entry) and stage2 is not None and state is not None:
        stage2.push(state)


def _url(url: str | None, **parts: str | int | None) -> str:
    """`url`, or the one that the parts make."""
    given = {name: str(value) for name, value in parts.items() if value is not None}
    if url is None:
        return _joined(**given)
    if given:
        raise ValueError(
            f"url says where the server is, and who asks: leave out {', '.join(given)}"
        )
    return url


def _joined(
    host: str = "127.0.0.1", port: str = str(DEFAULT_PORT), username: str = "", password: str = ""
) -> str:
    login = (
        f"{quote(username, safe='')}:{quote(password, safe='')}@" if username or password else ""
    )
    return f"pion://{login}{f'[{host}]' if ':' in host else host}:{port}"
