"""Lines of a user's code, by which errors and measurements name it."""

import sysconfig
import traceback
from pathlib import Path

# Files of labkit and of Python, and code without a file.
NOT_THE_USERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<frozen")
# What stands for a file's name where code has none: "cell:3", as in "train.py:3".
CELL = "cell"


class DescribedError(ValueError):
    """An error of a user's code in one line, with the line of the code: no class need be named."""


def user_line(error: Exception) -> str:
    """Return the deepest line of a user's code, as ", line 3 of the cell", or ""."""
    file, number = deepest_user_line(error)
    return describe_line(file, number) if file else ""


def describe_line(file: str, number: int | None) -> str:
    """Return a line as a phrase ends: ", line 3 of train.py", ", line 3 of the cell"."""
    return f", line {number} of {'the cell' if file == CELL else file}"


def deepest_user_line(error: BaseException) -> tuple[str, int | None]:
    """Return file and number of the deepest line of a user's code; "" and None without one."""
    # The deepest: above it the same error passes through the loops that called the code.
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = user_file(frame.filename)
        if file:
            return file, frame.lineno
    return "", None


def user_file(path: str) -> str:
    """Return the name of a user's file, `CELL` for code without one; "" for others' files."""
    if path.startswith(NOT_THE_USERS) or "site-packages" in path:
        return ""
    return Path(path).name if Path(path).is_file() else CELL
