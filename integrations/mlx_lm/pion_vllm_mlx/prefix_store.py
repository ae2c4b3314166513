"""PrefixStore: any prompt gets back the longest prefix of it that anyone prefilled.

Prefixes are chains of blocks (chain.py), so whatever two prompts share is stored once, whoever
computed it. `match` asks how much of a prompt is there, `restore` makes caches of it, each in one
round trip, and `insert` stores what is new, behind the request's back. Whatever goes wrong with
Pion is a shorter match.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from pion_server.client import DEFAULT_URL
from pion_vllm_mlx.background import Job
from pion_vllm_mlx.blocks import Insert, Restore, stride
from pion_vllm_mlx.caches import make_caches
from pion_vllm_mlx.chain import BLOCK_TOKENS, Chain
from pion_vllm_mlx.connected import Connected
from pion_vllm_mlx.entry import Entry
from pion_vllm_mlx.fingerprint import model_fingerprint, prefix_fingerprint
from pion_vllm_mlx.layout import NATIVE, read_layout
from pion_vllm_mlx.match import Match, Probe, stops
from pion_vllm_mlx.model import Cache, Model
from pion_vllm_mlx.pace import Pace
from pion_vllm_mlx.prefill import PREFILL_STEP_SIZE, prefill, segments
from pion_vllm_mlx.remote import Unavailable

# Names of namespaces to remember, some 100 bytes each.
MAX_KNOWN = 1 << 17


class PrefixStore(Connected):
    """The prefixes of one model, shared through the pion-server at `url`.

    `vquant`, `timeout`, `kv_bits` and `kv_group_size` are as in PionPromptCache, but that rows are
    `native` unless told otherwise. Engines share blocks where the model, these and `block_tokens`
    are the same. Use an instance from the thread that runs the model.

    Raises UnsupportedCacheError for a model with a class of cache that Pion does not know.
    """

    def __init__(
        self,
        model: Model,
        url: str = DEFAULT_URL,
        *,
        vquant: str = NATIVE,
        timeout: float = 5.0,
        block_tokens: int = BLOCK_TOKENS,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
    ) -> None:
        super().__init__(url, timeout)
        self._model = model
        self._block = block_tokens
        self._make_caches = partial(make_caches, model, kv_bits, kv_group_size)
        self._layout = read_layout(model, self._make_caches(), vquant, blocks=True)
        words = (*self._layout.words(), f"blocks of {block_tokens}")
        self._root = prefix_fingerprint(model_fingerprint(model), words, ())
        # How far apart the positions are that a prefix may end at, beside the ends of prompts.
        self.stride = stride(self._layout, block_tokens)
        self._pace = Pace()
        # Namespaces that are stored, or on their way. Single set operations are atomic.
        self._known: set[str] = set()

    @property
    def step(self) -> int | None:
        """`insert` has to see the caches whenever their length is a multiple of this, since states
        hold at one length only, and windows forget. None where the end is enough."""
        if self._layout.states:
            return self.stride
        if self._layout.windows.formats:
            return max(PREFILL_STEP_SIZE // self._block, 1) * self._block
        return None

    def match(self, tokens: Sequence[int], ends: Iterable[int] = ()) -> Match:
        """How much of `tokens` is there. That ends at a block boundary, or at one of `ends` or
        the end of `tokens`, where a prompt that was inserted may have ended too."""
        chain = Chain(self._root, tokens, self._block)
        probe = Probe(self._layout, chain, stops(chain, self.stride, ends))
        try:
            with self._remote.guard():
                answers = self._remote.read(probe.calls(self._root), self._timeout)
        except Unavailable:
            return Match(chain, 0)
        present = probe.present(answers)
        self._known.difference_update(probe.names)
        self._known |= present
        return Match(chain, probe.longest(present))

    def restore(self, match: Match, beyond: int = 0) -> list[Cache] | None:
        """Caches that hold the tokens of `match`, evaluated; the caller's to keep.

        None where they cannot be had, or where prefilling what comes after the first `beyond`
        tokens, which the caller has anyway, is likely to be faster.
        """
        if match.length <= beyond:
            self._stats.add(misses=1)
            return None
        restore = Restore(self._layout, match)
        if not self._pace.worth(match.length - beyond, restore.nbytes):
            self._stats.add(restores_skipped=1)
            return None
        start = time.perf_counter()
        caches = None
        with suppress(Unavailable), self._remote.guard():
            caches = self._fetch(match, restore)
        if caches is None:
            self._stats.add(misses=1)
            return None
        seconds = time.perf_counter() - start
        self._pace.restored(restore.nbytes, seconds)
        self._stats.add(
            hits=1,
            tokens_restored=match.length,
            bytes_fetched=restore.nbytes,
            fetch_ms_total=seconds * 1e3,
        )
        return caches

    def insert(self, tokens: Sequence[int], caches: Sequence[Cache], *, tail: bool = True) -> None:
        """Store what is new of `caches`, which hold `tokens`; they may change afterwards.

        With `tail` also what is behind the last block boundary, so that the same prompt, or one
        that names its end, gets all of it back. Never raises; may drop what is too much.
        """
        with suppress(Unavailable), self._remote.guard():
            if not self._layout.fits(caches, len(tokens)):
                self._stats.add(stores_dropped=1)
                return
            insert = Insert(
                self._layout,
                Chain(self._root, tokens, self._block),
                caches,
                known=self._known,
                every=self.stride,
                tail=tail,
            )
            if self._background.has_room(insert.row_bytes):
                self._submit(list(insert.entries(self._root)))
            else:
                self._stats.add(stores_dropped=1)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Tell how long a prefill took; `restore` compares itself with that."""
        self._pace.prefilled(tokens, seconds)

    def get_or_prefill(self, tokens: Sequence[int]) -> list[Cache]:
        """Caches that hold exactly `tokens`: restored as far as possible, prefilled from there,
        and stored."""
        match = self.match(tokens)
        caches = self.restore(match)
        done = match.length if caches is not None else 0
        caches = self._make_caches() if caches is None else caches
        for begin, end in segments(done, len(tokens), self.step):
            start = time.perf_counter()
            prefill(self._model, tokens[begin:end], caches)
            self.prefilled(end - begin, time.perf_counter() - start)
            self.insert(tokens[:end], caches)
        return caches

    def _fetch(self, match: Match, restore: Restore) -> list[Cache] | None:
        saved = self._pace.prefill_seconds(match.length)
        round_trip = restore.calls(self._root, None if saved is None else saved * 1e3)
        replies = self._remote.read(round_trip, self._remote.seconds(restore.nbytes))
        caches = self._make_caches()
        return caches if restore.fill(caches, replies) else None

    def _submit(self, entries: list[Entry]) -> None:
        names = [entry.namespace for entry in entries]
        nbytes = sum(entry.nbytes for entry in entries)
        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        self._known.update(names)
        job = Job("insert", nbytes, partial(self._write, entries))
        if entries and not self._background.submit(job):
            self._known.difference_update(names)
            self._stats.add(stores_dropped=1)

    def _write(self, entries: list[Entry]) -> None:
        """On the storing thread: send what nobody else has stored meanwhile."""
        stored = self._remote.store_missing(entries)
        self._known.difference_update(entry.namespace for entry in entries[stored:])
