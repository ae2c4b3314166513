"""`pion-server`: the command line in front of Config."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop
from pydantic import ValidationError

from pion_server import __version__
from pion_server.config import OWN_PORTS, Config, TenantOptions
from pion_server.errors import PionError
from pion_server.net.server import log_to_stderr, serve
from pion_server.workers.folders import refuse_folder_of_others
from pion_server.workers.supervisor import supervise

# Options that say what is always so, for the sake of existing scripts.
ACCEPTED = {
    "kvcache": "serve K/V prefixes; always on",
    "independent_workers": "workers share no data path; always so",
    "metal_attention": "attention on the GPU where there is one; what --attention auto does",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it is told to stop; returns the exit status."""
    options = vars(parser().parse_args(argv))
    for word in ACCEPTED:
        del options[word]
    try:
        options["tenants"] = _tenants(options.pop("tenant"), options["tenants"])
        config = Config(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        return _refuse("; ".join(_readable(item) for item in error.errors()), status=2)
    except ValueError as error:
        return _refuse(str(error), status=2)
    log_to_stderr(config)
    try:
        refuse_folder_of_others(config)
        if config.workers > 1:
            asyncio.run(supervise(config))
        else:
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
        epilog="The command line of a process can be seen by every user of the machine: rather "
        "keep passwords in a file (--tenants) or in the environment (PION_REQUIREPASS).",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"pion-server {__version__}")
    top.add_argument("--host", help="address to listen on (127.0.0.1)")
    top.add_argument("--port", type=int, help="TCP port, 0 for a free one (1974)")
    top.add_argument(
        "-w",
        "--workers",
        type=int,
        metavar="N",
        help="worker processes behind the port, each with its share of all limits; worker I also "
        f"listens on port + {OWN_PORTS} + 2 * I (1)",
    )
    top.add_argument(
        "--no-fast-lane",
        action="store_true",
        help="speak RESP only; else the binary lane is on the port behind each other",
    )
    top.add_argument(
        "--unixsocket",
        type=Path,
        metavar="PATH",
        help="also listen there, for this user's processes alone; worker I on PATH.I too (off)",
    )
    for word, what in ACCEPTED.items():
        top.add_argument(
            f"--{word.replace('_', '-')}", action="store_true", help=f"{what}, accepted for scripts"
        )
    _add_access(top.add_argument_group("access"))
    _add_durability(top.add_argument_group("durability"))
    _add_budgets(top.add_argument_group("budgets"))
    _add_attention(top.add_argument_group("attention"))
    top.add_argument(
        "--metrics-port",
        type=int,
        metavar="N",
        help="HTTP on 127.0.0.1: the receipt as a page, /metrics for Prometheus, /health; 0 for a "
        "free port (off)",
    )
    top.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error (info)")
    return top


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--requirepass",
        metavar="PASSWORD",
        default=os.environ.get("PION_REQUIREPASS"),
        help="password of the tenant `default` ($PION_REQUIREPASS)",
    )
    group.add_argument(
        "--tenant",
        metavar="NAME:SECRET[:QUOTA]",
        action="append",
        default=[],
        help="a user with prefixes, keys and counters of their own, and at most so much payload, "
        "for example 2gb; may be repeated",
    )
    group.add_argument(
        "--tenants",
        type=Path,
        metavar="FILE",
        help="the same, one a line, # begins a comment; only its owner may have access (chmod 600)",
    )
    group.add_argument("--ns-prefix", metavar="TEXT", help="refuse names that do not begin so")
    group.add_argument(
        "--maxclients",
        type=int,
        metavar="N",
        help="clients at a time, the same share for each tenant (10000)",
    )
    group.add_argument("--tls-cert", metavar="FILE", help="certificate chain: speak TLS only")
    group.add_argument("--tls-key", metavar="FILE", help="private key of the certificate")
    group.add_argument(
        "--tls-ca", metavar="FILE", help="take clients with a certificate of it only"
    )


def _add_budgets(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="memory to keep, for example 8gb; the least recently used goes first (no limit)",
    )
    group.add_argument(
        "--max-sessions",
        type=int,
        metavar="N",
        help="sessions to keep, of which a prefix has two; each tenant may have so many (no limit)",
    )
    group.add_argument(
        "--admission",
        type=int,
        metavar="N",
        help="keep a prefix, session or key when it is written for the N-th time (1)",
    )
    group.add_argument(
        "--default-ttl",
        type=int,
        metavar="SECONDS",
        help="how long a key lives that is SET without saying (for ever)",
    )


def _add_attention(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--attention",
        metavar="NAME",
        help="what computes ATTEND.*: numpy, mlx, or auto: MLX on a GPU, else numpy (auto)",
    )
    group.add_argument(
        "--metal-attention-fp16",
        action="store_true",
        default=None,
        help="keep attention state as fp16, in half the memory (fp32)",
    )
    group.add_argument(
        "--attend-slots",
        type=int,
        metavar="N",
        help="layers of attention state to keep, for each tenant and worker (256)",
    )
    group.add_argument(
        "--attend-memory",
        metavar="SIZE",
        help="attention state to keep, beside --max-memory (as much as that)",
    )


def _add_durability(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data-dir",
        type=Path,
        metavar="FOLDER",
        help="keep a log and snapshots there, and start from them (nothing on disk)",
    )
    group.add_argument(
        "--wal-fsync",
        metavar="POLICY",
        help="always: an acknowledged write survives a power cut; everysec: at most a second is "
        "lost to one; no: left to the system. A crash of the server loses nothing (everysec)",
    )


def _tenants(words: list[str], path: Path | None) -> list[TenantOptions]:
    """Those of the command line, then those of the file. Raises ValueError, which says where it is
    wrong and shows no secret."""
    found = [(f"--tenant number {number}", word) for number, word in enumerate(words, 1)]
    if path is not None:
        lines = enumerate(private_text(path).splitlines(), 1)
        found += [
            (f"{path} line {number}", line.strip())
            for number, line in lines
            if line.strip() and not line.lstrip().startswith("#")
        ]
    return [_tenant(where, text) for where, text in found]


def _tenant(where: str, text: str) -> TenantOptions:
    try:
        return TenantOptions.parse(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def private_text(path: Path) -> str:
    """The text of a file that only its owner has access to; raises ValueError for any other."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & 0o077:
                raise ValueError(
                    f"others have access to {path}, and it holds secrets: chmod 600 it"
                )
            return file.read()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def _readable(item: object) -> str:
    """One of pydantic's errors as a sentence about an option."""
    assert isinstance(item, dict)
    where = "".join(f"--{str(part).replace('_', '-')}: " for part in item["loc"])
    if item["type"] in ("byte_size", "byte_size_unit"):
        return f"{where}not a size; one is for example 512mb or 8gb"
    return where + str(item["msg"]).removeprefix("Value error, ").replace("Input should", "should")


def _refuse(message: str, status: int) -> int:
    print(f"pion-server: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
