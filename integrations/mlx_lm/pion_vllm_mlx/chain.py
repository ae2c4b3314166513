"""A token sequence as a chain of blocks, each named after everything up to its end.

    h[0] = H(root), h[i] = H(h[i-1], tokens of block i), the last block may be a partial one

`root` says which model and layout (a hex fingerprint), H is sha256, tokens are int64 little-endian.
Full blocks have the same number of tokens, so the length of a partial one is part of its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

BLOCK_TOKENS = 256


class Chain:
    """The names of the blocks of `tokens`. A block is called by the position of its end."""

    def __init__(self, root: str, tokens: Sequence[int], block: int = BLOCK_TOKENS) -> None:
        self.length = len(tokens)
        self._block = block
        self._tokens = np.asarray(tokens, "<i8")
        self._digests = [hashlib.sha256(bytes.fromhex(root)).digest()]
        for end in range(block, self.length + 1, block):
            self._digests.append(self._digest(end - block, end))

    @property
    def boundaries(self) -> range:
        """The ends of the full blocks."""
        return range(self._block, self.length + 1, self._block)

    def ends(self, position: int) -> list[int]:
        """The ends of the blocks that together hold the tokens before `position`, in order; the
        last block is a partial one where `position` is no boundary."""
        full = list(range(self._block, position + 1, self._block))
        return full if position % self._block == 0 else [*full, position]

    def start(self, end: int) -> int:
        """Where the block begins that ends at `end`."""
        return (end - 1) // self._block * self._block

    def name(self, end: int) -> str:
        """32 hex digits for the block that ends at `end`."""
        start = self.start(end)
        full = end - start == self._block
        digest = self._digests[end // self._block] if full else self._digest(start, end)
        return digest.hex()[:32]

    def names(self, ends: Sequence[int]) -> Iterator[str]:
        """The names of several blocks."""
        return map(self.name, ends)

    def _digest(self, start: int, end: int) -> bytes:
        before = self._digests[start // self._block]
        return hashlib.sha256(before + self._tokens[start:end].tobytes()).digest()
