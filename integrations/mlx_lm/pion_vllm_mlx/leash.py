"""Runs a module until its parent is gone: `python -m pion_vllm_mlx.leash MODULE ARGUMENT ...`.

The parent holds the other end of stdin, which closes when it ends, also by SIGKILL. Then this
process gets SIGTERM.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def main() -> None:
    """Run the module that the arguments name."""
    threading.Thread(target=_hold, name="leash", daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _hold() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
