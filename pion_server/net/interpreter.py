"""How Python is asked to run a server: so that nothing keeps the event loop waiting for long."""

from __future__ import annotations

import gc
import sys
from typing import Any

# How long a thread that computes may keep the interpreter from the event loop, which asks for it
# after every system call. Python's own figure is ten times as long.
SWITCH_SECONDS = 0.0005


def spare_the_loop() -> None:
    """Hand the interpreter over soon, and collect no garbage among what is held.

    Everything stored is made of objects that the garbage collector has to visit, some six for each
    layer; a full collection of 200,000 layers stops the server for 0.3 s, to find nothing: there
    are no reference cycles in what clients make and leave (tests/net/test_garbage.py). So an object
    that survives one is not visited again. It is freed by its reference count; as part of a cycle
    it would stay.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.callbacks.append(_freeze)


def _freeze(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()
