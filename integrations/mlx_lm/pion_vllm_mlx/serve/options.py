"""The command line of `serve`: a few options of ours, every other one is mlx_lm.server's."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from pion_server.client.url import parse_url
from pion_server.errors import PionError

EPILOG = "All other options are those of mlx_lm.server, which follow."


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked of Pion. Without a `url` a pion-server is started, with a budget in bytes, and
    with a folder to keep prefixes in across restarts where one is named."""

    url: str | None
    budget: int
    folder: Path | None
    timeout: float


def parse(arguments: list[str]) -> tuple[Options, list[str]]:
    """Our options, and the rest for mlx_lm.server. Exits where they cannot work."""
    parser = _parser()
    found, rest = parser.parse_known_args(arguments)
    if found.help:
        parser.print_help()
        print()
        return Options(None, 0, None, 0.0), ["--help"]
    url = found.pion_url or os.environ.get("PION_URL")
    if url and (found.pion_budget_gb is not None or found.pion_dir is not None):
        parser.error(
            "--pion-budget-gb and --pion-dir are for the pion-server that serve starts; the one "
            "that is named has its own --max-memory and --data-dir"
        )
    try:
        if url:
            parse_url(url)
    except PionError as error:  # does not quote it: it may hold a password
        parser.error(f"--pion-url (or $PION_URL): {error}")
    gigabytes = 4.0 if found.pion_budget_gb is None else found.pion_budget_gb
    return Options(url, int(gigabytes * 1e9), found.pion_dir, found.pion_timeout), rest


def _parser() -> argparse.ArgumentParser:
    # No abbreviations: `--p` might be meant for mlx_lm.server.
    parser = argparse.ArgumentParser(
        prog="pion-vllm-mlx serve",
        usage="pion-vllm-mlx serve --model MODEL [options]",
        description="An OpenAI server whose prompt cache is shared through Pion.",
        epilog=EPILOG,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="this, and mlx_lm.server's")
    parser.add_argument(
        "--pion-url",
        metavar="URL",
        help="the pion-server to use, e.g. pion://:password@host:1974 (default: $PION_URL, which "
        "other users of this machine cannot see; else one is started here)",
    )
    parser.add_argument(
        "--pion-budget-gb",
        type=_positive,
        metavar="GB",
        help="memory for the prefixes of the pion-server that is started (default: 4)",
    )
    parser.add_argument(
        "--pion-dir",
        type=Path,
        metavar="PATH",
        help="folder in which that server keeps prefixes across restarts (default: memory only)",
    )
    parser.add_argument(
        "--pion-timeout",
        type=_positive,
        default=1.0,
        metavar="S",
        help="seconds that a request, and with it every stream, may wait for Pion (default: 1)",
    )
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value
