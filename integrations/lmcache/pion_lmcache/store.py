"""`PionStore`: rows of K and V by layer, for whoever has tensors and no engine.

    with PionStore(port=1974, vquant="fp16") as store:
        store.register("my_app|prompt_a", kv_dim=128)
        store.store_layer("my_app|prompt_a", "V", layer=0, token_offset=0, tensor_fp32=v)
        v = store.fetch_layer("my_app|prompt_a", "V", layer=0, start=0, end=len(v))

Not a cache for engines: errors are raised (pion_server/errors.py), not turned into misses.
"""

from __future__ import annotations

from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from pion_lmcache.tensors import array_of, format_of
from pion_server.client import Client, calls

Side: TypeAlias = Literal["K", "V"]
_SESSION = {"K": "_pk", "V": "_pv"}


class PionStore:
    """One server's namespaces. `vquant` is the codec of those that are registered here.

    With `auto_redirect` a namespace that lives on another worker of the server is asked for there.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 1974,
        *,
        url: str | None = None,
        vquant: str = "fp16",
        timeout: float = 10.0,
        auto_redirect: bool = True,
    ) -> None:
        self._vquant = vquant
        self._client = Client(
            url or f"pion://{host}:{port}", timeout=timeout, auto_redirect=auto_redirect
        )

    def register(
        self,
        ns: str,
        kv_dim: int,
        *,
        layers: int | None = None,
        tokens: int | None = None,
        fingerprint: str | None = None,
        blocks: tuple[int, npt.NDArray[np.uint64]] | None = None,
    ) -> None:
        """Open a namespace of `kv_dim` values a row. With `layers` and `tokens` it is a hit only
        when all of them are in. `blocks` is (tokens a block, u64 hashes)."""
        self._client.execute(
            calls.prefix_register(
                ns,
                kv_dim,
                self._vquant,
                layers=layers,
                tokens=tokens,
                fingerprint=fingerprint,
                blocks=blocks,
            )
        )

    def store_layer(
        self, ns: str, side: Side, *, layer: int, token_offset: int, tensor_fp32: Any
    ) -> None:
        """Store rows from token `token_offset` on: numpy or torch, (tokens, ...) of float32, or of
        float16 or bfloat16, which go out as they are. Raises TypeError on other dtypes."""
        rows = np.ascontiguousarray(array_of(tensor_fp32))
        sid, fmt = ns + _SESSION[side], format_of(rows)
        self._client.execute(calls.v_storebatch(sid, layer, token_offset, len(rows), rows, fmt=fmt))

    def fetch_layer(
        self, ns: str, side: Side, *, layer: int, start: int, end: int, out: Any = None
    ) -> Any:
        """Rows [start, end) of a layer: fp32 (end - start, dim), or `out` (numpy or torch on CPU,
        of any of the three dtypes, C-contiguous) after they were received into it."""
        sid = ns + _SESSION[side]
        if out is not None:
            into = array_of(out)
            self._client.execute(
                calls.v_fetch(sid, layer, start, end, fmt=format_of(into), into=into)
            )
            return out
        rows = self._client.execute(calls.v_fetch(sid, layer, start, end))
        return np.frombuffer(rows, np.float32).reshape(end - start, -1)

    def lookup(self, ns: str, *, fingerprint: str | None = None) -> bool:
        """Whether the namespace is a hit; the server's receipt counts it."""
        return self._client.execute(calls.prefix_lookup(ns, fingerprint=fingerprint))

    def blocks(self, ns: str) -> calls.BlockTable | None:
        """The block table that was registered, or None."""
        return self._client.execute(calls.prefix_blocks(ns))

    def membership(self, ns: str, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_] | None:
        """For each hash, whether it is in the block table; None where there is none."""
        return self._client.execute(calls.prefix_membership(ns, hashes))

    def drop(self, ns: str) -> bool:
        """Free a namespace. Whether it was there."""
        return self._client.execute(calls.prefix_drop(ns)) == 1

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
