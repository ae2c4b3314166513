"""What a type checker must see; test_typing.py runs mypy --strict over this file.

Each `type: ignore` marks a line that must be an error: mypy reports one that is not needed.
"""

from collections.abc import Coroutine
from typing import Any, assert_type

import numpy as np

from pion_server.client import AsyncClient, Call, Client, PionError, PrefixRows, calls

client, async_client = Client(), AsyncClient()

assert_type(calls.prefix_fetch("ns"), Call[PrefixRows | None])
assert_type(client.ping(), str)
assert_type(client.get("k"), bytes | memoryview | None)
assert_type(client.prefix_lookup("ns", tokens=3), bool)
assert_type(client.prefix_fetch("ns", fmt="FP16"), PrefixRows | None)
assert_type(client.execute(calls.dbsize(), timeout=1.0), int)
assert_type(client.pipeline([calls.dbsize(), calls.ttl("k")]), list[int | PionError])
assert_type(client.v_storebatch("s", 0, 0, 1, np.ones(4)), None)


pending = assert_type(async_client.prefix_fetch("ns"), Coroutine[Any, Any, PrefixRows | None])
async_client.ping()  # type: ignore[unused-coroutine]


async def awaited() -> None:
    assert_type(await async_client.prefix_match(["a", b"b"]), int)
    assert_type(await async_client.execute(calls.exists("k")), int)
    assert_type(await async_client.pipeline([calls.ping()]), list[str | PionError])


assert_type(Client.prefix_lookup("ns"), Call[bool])

client.prefix_lookup()  # type: ignore[call-arg]
client.prefix_lookup("ns", tokens="3")  # type: ignore[arg-type]
client.prefix_fetch("ns", fmt="FP8")  # type: ignore[arg-type]
client.no_such_command()  # type: ignore[attr-defined]
