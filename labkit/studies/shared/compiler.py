"""What torch.compile needs once of a C++ compiler, before it compiles anything.

torch tries which instructions the compiler and this processor know, and compiles its own headers: 15 s on two cores,
which are no model's. torch keeps the results in its cache, in the user's temporary directory. A rank has a temporary
directory of its own, which goes with it, and would make them anew.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from labkit.parallel.ranks.worker import COMPILED_CODE, USERS_CACHE, USERS_DIRECTORY

TEMPORARY = "TMPDIR"


def keep_what_is_compiled() -> None:
    """From now on this rank's compiled code goes into torch's own cache of the user, and is found there again.

    For what is compiled to be run: seconds that are a result themselves are those of an empty cache.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # a second, where nothing is compiled

    with _users_directory():
        directory = cache_dir()
    os.environ[COMPILED_CODE] = directory


@cache
def make_compiler_ready(device: str) -> float:
    """On a CPU, compile a sum: what is compiled next in this process finds the compiler tried. Returns the seconds.

    The cache is torch's own, whatever directory this rank has; only these results go there. To be called before
    anything else loads torch's compiler, which remembers where its headers are. Raises what torch does.
    """
    start = time.perf_counter()
    if torch.device(device).type == "cpu":
        with _users_directory():
            torch.compile(_add_one)(torch.zeros(64))
        torch._dynamo.reset()
    return time.perf_counter() - start


def _add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@contextmanager
def _users_directory() -> Iterator[None]:
    """The temporary directory and the place of compiled code that the user has, instead of a rank's."""
    before = {name: os.environ.get(name) for name in (TEMPORARY, COMPILED_CODE)}
    os.environ[TEMPORARY] = os.environ.get(USERS_DIRECTORY) or tempfile.gettempdir()
    # torch sets it to what it uses, which in a rank is of the rank
    cache = os.environ.pop(COMPILED_CODE, None)
    if users := os.environ.get(USERS_CACHE) if USERS_DIRECTORY in os.environ else cache:
        os.environ[COMPILED_CODE] = users
    tempfile.tempdir = None  # read again
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = None
