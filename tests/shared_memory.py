"""Names in /dev/shm: which of them nobody needs any more. Other programs, and other tests, have some there, too."""

from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")


def names() -> set[Path]:
    return set(FOLDER.iterdir())


def left_behind(before: set[Path]) -> set[Path]:
    """What has come to be there since `before`, and is neither mapped nor open in any process that is alive."""
    new = names() - before
    if not new:
        return new
    in_use = _in_use()
    return {path for path in new if str(path) not in in_use} & names()


def _in_use() -> set[str]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is somebody else's
            maps = (process / "maps").read_text().splitlines()
            found |= {line.split()[-1] for line in maps if f" {FOLDER}/" in line}
        with suppress(OSError):
            found |= {str(link.readlink()) for link in (process / "fd").iterdir() if link.is_symlink()}
    return found
