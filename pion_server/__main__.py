"""`pion-server`: the command line in front of Config."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence

import uvloop
from pydantic import ValidationError

from pion_server import __version__
from pion_server.config import Config
from pion_server.errors import PionError
from pion_server.net.server import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it is told to stop; returns the exit status."""
    options = vars(parser().parse_args(argv))
    del options["kvcache"]  # says what is always so
    try:
        config = Config(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        return _refuse("; ".join(_readable(item) for item in error.errors()), status=2)
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(config))
    except PionError as error:
        return _refuse(str(error), status=1)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options; each one is a field of Config."""
    top = argparse.ArgumentParser(
        prog="pion-server",
        description="Keep the K/V tensors that prefill computed, for any engine that meets the "
        "same prefix again. Speaks the Redis protocol.",
        argument_default=None,
    )
    top.add_argument("--version", action="version", version=f"pion-server {__version__}")
    top.add_argument("--host", help="address to listen on (127.0.0.1)")
    top.add_argument("--port", type=int, help="TCP port, 0 for a free one (1974)")
    top.add_argument("-w", "--workers", type=int, help="worker processes (1; more are to come)")
    top.add_argument(
        "--kvcache",
        action="store_true",
        help="serve K/V prefixes; always on, accepted for the sake of existing scripts",
    )
    top.add_argument("--requirepass", metavar="PASSWORD", help="password every client must send")
    top.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="payload to keep, for example 8gb; the least recently used goes first (no limit)",
    )
    top.add_argument("--log-level", help="debug, info, warning or error (info)")
    return top


def _readable(item: object) -> str:
    """One of pydantic's errors as a sentence about an option."""
    assert isinstance(item, dict)
    where = "".join(f"--{str(part).replace('_', '-')}: " for part in item["loc"])
    return where + str(item["msg"]).removeprefix("Value error, ")


def _refuse(message: str, status: int) -> int:
    print(f"pion-server: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
