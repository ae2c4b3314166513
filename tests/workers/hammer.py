"""One process of test_readers_beside_a_writer: `hammer.py <descriptor> write | read`.

Even names are always listed and only change, odd ones come and go. Every entry can be checked: its
fingerprint is made of its tokens and its name. Prints counts; an assertion ends it.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from hashlib import blake2b

from pion_server.team import Listing
from pion_server.workers.shared import Shared

SECONDS = 2.0
NAMES = [blake2b(b"%d" % number, digest_size=16).digest() for number in range(300)]


def entry(number: int, tokens: int) -> Listing:
    mark = blake2b(b"%d %d" % (number, tokens)).digest()
    return Listing(0, True, bool(tokens % 2), tokens, float(tokens), mark)


def write(shared: Shared, until: float) -> Counter[str]:
    own, counts = shared.own_table(0, 0), Counter[str]()
    own.refill((NAMES[number], entry(number, 0)) for number in range(0, len(NAMES), 2))
    shared.seat(0, 1, up=True)
    tokens = 0
    while time.monotonic() < until:
        for number, name in enumerate(NAMES):
            tokens += 1
            if number % 2 and name in own:
                own.remove(name)
            else:
                own.put(name, entry(number, tokens))
        if tokens % 7 == 0:
            own.refill((NAMES[number], entry(number, tokens)) for number in range(0, len(NAMES), 2))
    counts["rebuilds"] = own._generation() >> 8
    return counts


def read(shared: Shared, until: float) -> Counter[str]:
    table, counts = shared.table(0, 0), Counter[str]()
    while not shared.seated(0)[1]:
        time.sleep(0.001)
    while time.monotonic() < until:
        number = random.randrange(len(NAMES))
        found = table.find(NAMES[number])
        if found is None:
            assert number % 2, "a name that is always listed was not found"
            counts["not_there"] += 1
        else:
            assert found == entry(number, found.tokens)
            counts["flickering" if number % 2 else "there"] += 1
    return counts


if __name__ == "__main__":
    mapping = Shared(int(sys.argv[1]), 1, 1)
    role = {"write": write, "read": read}[sys.argv[2]]
    result = role(mapping, time.monotonic() + SECONDS)
    print(*(f"{name}={count}" for name, count in result.items()))
