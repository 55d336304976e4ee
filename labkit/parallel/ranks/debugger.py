"""`breakpoint()` in a rank: pdb on a terminal, which ranks do not have themselves."""

from __future__ import annotations

import multiprocessing
import os
import pdb
import sys
from pathlib import Path
from typing import Any

import psutil

# Variable with the path of the terminal, such as /dev/pts/3. The caller's, unless it is set.
TERMINAL = "LABKIT_TERMINAL"


def terminal_variables() -> dict[str, str]:
    """Return the variable that names this process's terminal to its ranks; {} without one."""
    terminal = os.environ.get(TERMINAL) or psutil.Process().terminal()
    return {TERMINAL: terminal} if terminal else {}


def break_here(*_: Any, **__: Any) -> None:
    """Open pdb at the line that calls this, in a rank.

    RuntimeError if the ranks were started without a terminal.
    """
    path = os.environ.get(TERMINAL)
    if path is None:
        raise RuntimeError(
            f"breakpoint: expected ranks that were started in a terminal, or {TERMINAL} set to one"
            " (`tty` prints its name)"
        )
    terminal = Path(path)
    debugger = pdb.Pdb(stdin=terminal.open(), stdout=terminal.open("w"), nosigint=True)
    debugger.prompt = f"({multiprocessing.current_process().name}) "
    debugger.set_trace(sys._getframe(1))
