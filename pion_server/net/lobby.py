"""Connections that are nobody's: in a TLS handshake, or not logged in.

They do not count as clients, or strangers could keep out all others by doing nothing; the oldest
gives way instead. So a newcomer is let in whatever others do, and has its AUTH read unless ROOM
more connections come before it.
"""

from __future__ import annotations

from typing import Protocol

# Twice the listening backlog (server.py), so that clients who all come back at once are not each
# other's victims; each can make the server hold 160 KB (wire/limits.py).
ROOM = 1024


class Stranger(Protocol):
    """A connection, as far as the lobby cares."""

    def abort(self) -> None:
        """Drop it now; it leaves the lobby by itself."""


class Lobby:
    """At most ROOM connections, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: dict[Stranger, None] = {}

    def enter(self, stranger: Stranger) -> None:
        """One more; the oldest goes where there are too many."""
        self._waiting[stranger] = None
        if len(self._waiting) > ROOM:
            oldest = next(iter(self._waiting))
            self.leave(oldest)
            oldest.abort()

    def leave(self, stranger: Stranger) -> None:
        """It has logged in, or is gone."""
        self._waiting.pop(stranger, None)
