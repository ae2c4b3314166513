"""Everything a server keeps, as things that hold a tag.

Writing a tag makes bytes of it; reading gives the tag back, None where nothing is held, and fails
on anything in between: half of a prefix, rows of two tags, bytes that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pion_server.client import Client
from pion_server.errors import PionError

DIM = 8
ROWS = 40
LAYERS = 3


def blob(tag: int, nbytes: int) -> bytes:
    """`nbytes` that could be of no other tag."""
    return np.full(nbytes // 8 + 1, tag, np.uint64).tobytes()[:nbytes]


def tag_of(data: bytes | memoryview) -> int:
    """The tag that all of `data` is made of."""
    tags = set(np.frombuffer(bytes(data)[: len(data) // 8 * 8], np.uint64).tolist())
    assert len(tags) == 1, f"bytes of {len(tags)} writes: {sorted(tags)[:4]}"
    return int(tags.pop())


@dataclass(frozen=True)
class Thing:
    """A name on the server, of one of the kinds below."""

    kind: str
    name: str

    def write(self, client: Client, tag: int) -> None:
        """Make it hold `tag`, in one acknowledged command or several."""
        KINDS[self.kind][0](client, self.name, tag)

    def remove(self, client: Client) -> None:
        KINDS[self.kind][1](client, self.name)

    def read(self, client: Client) -> int | None:
        return KINDS[self.kind][2](client, self.name)


def _write_key(client: Client, name: str, tag: int) -> None:
    client.set(name, blob(tag, 64 + tag % 30_000))


def _read_key(client: Client, name: str) -> int | None:
    data = client.get(name)
    return None if data is None else tag_of(data)


def _write_state(client: Client, name: str, tag: int) -> None:
    client.ssm_store(name, 1, blob(tag, 64 + tag % 30_000))


def _read_state(client: Client, name: str) -> int | None:
    data = client.ssm_fetch(name, 1)
    return None if data is None else tag_of(data)


def _write_prefix(client: Client, name: str, tag: int) -> None:
    layout = [("fp32", DIM)] * LAYERS
    mark = f"{tag:016x}"
    rows = blob(tag, 4 * DIM * ROWS)
    client.prefix_drop(name)
    client.prefix_register_schema(name, layout, layout, tokens=ROWS, fingerprint=mark)
    client.prefix_store(name, 0, ROWS, [(rows, rows)] * LAYERS, fmt="NATIVE", fingerprint=mark)


def _remove_prefix(client: Client, name: str) -> None:
    client.prefix_drop(name)


def _read_prefix(client: Client, name: str) -> int | None:
    found = client.prefix_fetch(name, fmt="NATIVE")
    if found is None:
        return None
    tags = {tag_of(side) for pair in found.rows for side in pair}
    assert len(tags) == 1, f"a prefix of {len(tags)} writes"
    assert found.tokens == ROWS
    return tags.pop()


def _write_session(client: Client, name: str, tag: int) -> None:
    client.v_create(name, DIM, "fp32")
    client.v_storebatch(name, 0, 0, ROWS, blob(tag, 4 * DIM * ROWS), fmt="NATIVE")


def _read_session(client: Client, name: str) -> int | None:
    try:
        return tag_of(client.v_fetch(name, 0, 0, ROWS, fmt="NATIVE"))
    except PionError:
        return None  # no such session, or no rows in it yet


def _no_way_to_remove(client: Client, name: str) -> None:
    raise NotImplementedError("a session without a namespace goes by eviction only")


Kind = tuple[
    Callable[[Client, str, int], None],
    Callable[[Client, str], object],
    Callable[[Client, str], int | None],
]
KINDS: dict[str, Kind] = {
    "key": (_write_key, lambda client, name: client.delete(name), _read_key),
    "state": (_write_state, lambda client, name: client.ssm_drop(name), _read_state),
    "prefix": (_write_prefix, _remove_prefix, _read_prefix),
    "session": (_write_session, _no_way_to_remove, _read_session),
}
REMOVABLE: Sequence[str] = ("key", "state", "prefix")
