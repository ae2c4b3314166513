"""`pion-vllm-mlx`: the command line.

pion-vllm-mlx serve --model MODEL [options]     an OpenAI server with shared prompt caches
"""

from __future__ import annotations

import sys

USAGE = "usage: pion-vllm-mlx serve --model MODEL [options]     (--help lists them)"


def main() -> int:
    """Run the command that is named first; the exit status."""
    command, *arguments = sys.argv[1:] or [""]
    if command != "serve":
        print(USAGE, file=sys.stdout if command in ("-h", "--help") else sys.stderr)
        return 0 if command in ("-h", "--help") else 2
    from pion_vllm_mlx.serve.run import serve

    return serve(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
