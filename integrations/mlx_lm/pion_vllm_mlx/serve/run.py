"""Runs mlx_lm.server with Pion behind its prompt cache, and a pion-server where none is named."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from pion_vllm_mlx.blas import load_fast_blas
from pion_vllm_mlx.processes import StartError, pion_server
from pion_vllm_mlx.serve.options import Options, parse

# The generation thread, already joined, is still dropping what mlx compiled for it. It needs the
# interpreter for that, and aborts the process where that is gone.
LAST_BREATH_S = 0.2


def serve(arguments: list[str]) -> int:
    """`pion-vllm-mlx serve`; the exit status. Returns when the server is told to stop."""
    options, rest = parse(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with ExitStack() as stack:
            # Help needs no server.
            url = options.url or ("" if "--help" in rest else stack.enter_context(_local(options)))
            _run(url, options.timeout, rest)
    except StartError as error:
        print(f"pion-vllm-mlx serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the server has begun to listen
        return 130
    return 0


@contextmanager
def _local(options: Options) -> Iterator[str]:
    """A pion-server of our own; its URL."""
    arguments = ["--max-memory", str(options.budget)]
    if options.folder is not None:
        arguments += ["--data-dir", str(options.folder)]
    with pion_server(*arguments) as port:
        yield f"pion://127.0.0.1:{port}"


def _interrupt(*_: object) -> None:
    """SIGTERM ends the server as Ctrl-C does, which it knows how to handle."""
    raise KeyboardInterrupt


def _run(url: str, timeout: float, arguments: list[str]) -> None:
    """mlx_lm.server's own main(), with three of its classes replaced."""
    load_fast_blas()  # before anything imports mlx
    from mlx_lm import server

    from pion_vllm_mlx.serve.backing import Backing
    from pion_vllm_mlx.serve.generator import BlockResponseGenerator, batch_generator
    from pion_vllm_mlx.serve.prompt_cache import PionLRUPromptCache

    backing = Backing(url, timeout)
    module: Any = server
    module.LRUPromptCache = partial(PionLRUPromptCache, backing)
    module.ResponseGenerator = BlockResponseGenerator
    module.BatchGenerator = partial(batch_generator, backing)
    sys.argv = ["pion-vllm-mlx serve", *arguments]
    try:
        module.main()
    finally:
        backing.close()
        time.sleep(LAST_BREATH_S)
