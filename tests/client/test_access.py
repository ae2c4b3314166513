"""Invariant: a connection is the user's, in the db of the URL, in every process; and a password
leaves the client towards the server only.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from typing import Any

import pytest

from pion_server.client import Call, Client, NoAuth, PionError, WrongPass
from pion_server.client.calls.base import integer, status

SECRET = "s3cret-w0rd"  # PASSWORD of tests/conftest.py
QUOTED = "s3cret%2Dw0rd"
CLIENT_ID = Call(("CLIENT", "ID"), integer)


@pytest.fixture(params=["locked_pion", "locked_redis"])
def locked(request: pytest.FixtureRequest) -> Any:
    """A server that wants a password."""
    return request.getfixturevalue(request.param)


def at(server: Any, login: str) -> str:
    return f"pion://{login}{server.host}:{server.port}"


REFUSED = {"": NoAuth, ":no%20ne@": WrongPass, f"ann:{QUOTED}@": WrongPass}


def test_the_password_opens_the_door_and_is_shown_nowhere(
    connect: Any, locked: Any, caplog: Any
) -> None:
    caplog.set_level(logging.DEBUG)
    for login in (f":{QUOTED}@", f"default:{QUOTED}@"):
        assert connect(at(locked, login)).ping() == "PONG"
    for login, error in REFUSED.items():
        client = connect(at(locked, login))
        for _ in range(2):
            with pytest.raises(error) as caught:
                client.ping()
        told = "".join(traceback.format_exception(caught.value)) + caplog.text + repr(client)
        for secret in (SECRET, QUOTED, "no ne", "no%20ne"):
            assert secret not in told


def test_the_db_of_the_url_holds_after_a_reconnect(connect: Any, pion_server: Any) -> None:
    in_five, in_zero = connect(f"{pion_server.url}/5"), connect(pion_server.url)
    in_five.set("where", "five")
    assert in_zero.get("where") is None
    old = in_five.execute(CLIENT_ID)
    assert in_five.execute(Call(("QUIT",), status)) == "OK"
    assert in_five.get("where") == b"five"
    assert in_five.execute(CLIENT_ID) != old
    in_five.delete("where")


def test_a_db_that_is_not_there(connect: Any, pion_server: Any) -> None:
    with pytest.raises(PionError, match="DB index"):
        connect(f"{pion_server.url}/999999").ping()


def in_a_child(work: Any) -> bytes:
    """What `work` returns in a forked process."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, work())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read()


def test_a_forked_child_has_a_connection_of_its_own(pion_server: Any) -> None:
    with Client(pion_server.url) as client:
        mine = client.execute(CLIENT_ID)
        childs = in_a_child(lambda: b"%d" % client.execute(CLIENT_ID))
        assert childs.isdigit()
        assert int(childs) != mine
        assert in_a_child(lambda: str(client.close()).encode()) == b"None"
        assert client.execute(CLIENT_ID) == mine


def test_a_child_forked_during_a_call_is_not_locked_out(fake: Any) -> None:
    def late(peer: Any) -> None:
        peer.greet()
        peer.request()
        asked.set()
        go.wait(20)
        peer.send(b"+PONG\r\n")

    def answers(peer: Any) -> None:
        peer.greet()
        peer.request()
        peer.send(b"+PONG\r\n")

    asked, go = threading.Event(), threading.Event()
    with Client(fake(late, answers).url, timeout=20) as client:
        thread = threading.Thread(target=client.ping)
        thread.start()
        asked.wait(20)
        assert in_a_child(lambda: client.ping().encode()) == b"PONG"
        go.set()
        thread.join()
