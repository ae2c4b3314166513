"""The survey over the model families, and docs/MODELS.md.

    python survey.py write|read PORT FAMILY ...    one of its two processes; JSON lines on stdout
    python survey.py table                         all families, the page on stdout

`write` prefills a prompt in every family, stores it, and goes on from it; `read`, a fresh process,
restores it and goes on. What they report are digests of 16 steps' logits, so equal ones mean: bit
for bit. Done for an exact namespace, for a chain of blocks at the prompt's own length, and at a
shorter block boundary. `slid` is how many leaves with a window had dropped rows when they were
stored, and of how many: the prompt is longer than all windows and chunks, and so are the steps in
which it is prefilled.
"""

# ruff: noqa: E402 - a fast BLAS must be in the process before mlx is
from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

from pion_vllm_mlx import load_fast_blas

load_fast_blas()

import mlx.core as mx
import numpy as np
from families import FAMILIES, LEFT_OUT, build
from pion_vllm_mlx import PionPromptCache, PrefixStore
from pion_vllm_mlx import prefill as prefilling
from pion_vllm_mlx.caches import Part, kind_of, leaves, make_caches
from pion_vllm_mlx.layout import read_layout
from pion_vllm_mlx.prefill import prefill, segments
from pion_vllm_mlx.processes import pion_server

Result = dict[str, Any]

BLOCK = 48  # the rarest states come every 8 blocks, which is before SHORTER
PROMPT = [(7 * number + number // 50) % 100 for number in range(400)]
SHORTER = 390  # a prompt that shares so many tokens, and ends at no boundary
SUFFIX = [5, 6, 7]
STEPS = 16
STEP_SIZE = 300  # of the prefill: it takes more than one


def go_on(model: Any, caches: list[Any]) -> str:
    """Digest of the logits of 16 greedy steps on a copy of `caches`."""
    caches = copy.deepcopy(caches)
    logits = [model(mx.array([SUFFIX]), cache=caches)[0, -1]]
    for _ in range(STEPS - 1):
        token = mx.argmax(logits[-1]).reshape(1, 1)
        logits.append(model(token, cache=caches)[0, -1])
    return hashlib.sha256(np.asarray(mx.stack(logits)).tobytes()).hexdigest()


def slid(caches: list[Any]) -> list[int]:
    """How many leaves with a window have dropped rows, and of how many."""
    windows = [leaf for leaf in leaves(caches) if kind_of(leaf).window(leaf) and not leaf.empty()]
    dropped = (kind_of(leaf).rows(leaf)[0].shape[2] < len(PROMPT) for leaf in windows)
    return [sum(dropped), len(windows)]


def write(family: str, port: int) -> Result:
    """Prefill, store, and go on."""
    model = build(family)
    with PionPromptCache(model, port=port, vquant="native", timeout=30) as exact:
        caches = exact.get_or_prefill(PROMPT, namespace=family)
        result = {"exact": go_on(model, caches), "slid": [slid(caches)]}
    with PrefixStore(model, url(port), block_tokens=BLOCK, timeout=30) as store:
        caches = make_caches(model)
        boundary = SHORTER // store.stride * store.stride
        for begin, end in segments(0, len(PROMPT), BLOCK):
            prefill(model, PROMPT[begin:end], caches)
            store.insert(PROMPT[:end], caches)
            if end == boundary:
                result |= {"boundary": go_on(model, caches), "length": end}
        result["end"] = go_on(model, caches)
        result["slid"].append(slid(caches))
    return result


def read(family: str, port: int) -> Result:
    """Restore and go on."""
    model = build(family)
    with PionPromptCache(model, port=port, vquant="native", timeout=30) as exact:
        caches = exact.get_or_prefill(PROMPT, namespace=family)
        result = {"exact": go_on(model, caches), "slid": [slid(caches)]}
        errors = [exact.stats()["misses"], exact.stats()["errors"]]
    with PrefixStore(model, url(port), block_tokens=BLOCK, timeout=30) as store:
        for name, tokens in (("boundary", PROMPT[:SHORTER]), ("end", PROMPT)):
            match = store.match(tokens)
            caches = store.restore(match)
            result[name] = go_on(model, caches) if caches is not None else "nothing"
            if name == "boundary":
                result["length"] = match.length
        result["slid"].append(slid(caches or []))
        errors += [store.stats()["misses"], store.stats()["errors"]]
    return result if errors == [0, {}, 0, {}] else {**result, "errors": errors}


def url(port: int) -> str:
    return f"pion://127.0.0.1:{port}"


ROLES: dict[str, Callable[[str, int], Result]] = {"write": write, "read": read}


def survey(families: Iterable[str]) -> dict[str, tuple[Result, Result]]:
    """What the two processes report, by family."""
    families = list(families)
    with pion_server() as port:
        written, restored = (run(role, port, families) for role in ROLES)
    return {name: (written[name], restored[name]) for name in families}


def run(role: str, port: int, families: list[str]) -> dict[str, Result]:
    command = [sys.executable, __file__, role, str(port), *families]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(line) for line in done.stdout.splitlines())


def row(family: str) -> str:
    """The family's line in docs/MODELS.md."""
    model = build(family)
    caches = make_caches(model)
    classes = sorted({type(cache).__name__ for cache in leaves(caches)})
    layout = read_layout(model, caches, "native", blocks=True)
    parts = {leaf.part for leaf in layout.leaves if leaf.used}
    words = {Part.ROWS: "rows", Part.WINDOW: "windows", Part.STATE: "states"}
    kept = ", ".join(word for part, word in words.items() if part in parts)
    boundaries = "where a state is kept" if Part.STATE in parts else "every block"
    return f"| `{family}` | {', '.join(classes)} | {kept} | yes | {boundaries} |"


INTRODUCTION = """\
# Model families

Which of mlx-lm's model families Pion restores, and where. Written by `survey.py table` in
`integrations/mlx_lm/tests/support`; the tests fail where it is not up to date.

Each family was built small, with random weights. One process prefilled a prompt of {prompt}
tokens, longer than every window and chunk, stored it, and went on for {steps} tokens. Another
process, which had only the server, restored it and went on. All logits were equal, bit for bit: for
an exact namespace (`PionPromptCache`), for a chain of blocks (`PrefixStore`) at the prompt's own
length, and for one at a shorter block boundary.

- **rows**: K and V of every token, stored once a block. Any leading run of blocks is a prefix.
- **windows**: rows of layers that look back only so far. All are stored, so a prefix may end at
  every block, too, although the live cache could not go back. They come back in the order of their
  tokens: right after answers, whose tokens came one by one, one more token alone may differ from
  the live cache's in its last bits; two or more put the ring into that order, too.
- **states**: what a recurrent layer holds, valid at one length. A prefix ends where one is kept: at
  the ends of prompts, and every 1 to 8 blocks, so that states cost at most twice what the rows do.

| family | caches | kept as | exact length | shorter prefixes |
|---|---|---|---|---|
"""


def table(families: Iterable[str] = FAMILIES) -> str:
    """The page."""
    lines = [row(family) for family in families]
    left_out = [f"- `{family}`: {why}." for family, why in LEFT_OUT.items()]
    head = INTRODUCTION.format(prompt=len(PROMPT), steps=STEPS)
    return "\n".join([head + "\n".join(lines), "", "Not in the survey:", "", *left_out, ""])


def main() -> int:
    """Run one of the processes, or print the page."""
    role, *rest = sys.argv[1:]
    if role == "table":
        reports = survey(FAMILIES)
        wrong = {name: pair for name, pair in reports.items() if pair[0] != pair[1]}
        print(table(), end="")
        print("\n".join(f"{name}: {pair}" for name, pair in wrong.items()), file=sys.stderr)
        return bool(wrong)
    port, *families = rest
    prefilling.PREFILL_STEP_SIZE = STEP_SIZE  # of this process only
    for family in families:
        print(json.dumps((family, ROLES[role](family, int(port)))), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
