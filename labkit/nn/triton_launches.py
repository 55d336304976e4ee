"""Whether Triton can launch kernels here: not where it is not installed, or cannot build the C part of its driver.

Triton compiles kernels by itself, but what hands them to the GPU is C that it builds at the first launch, with the
compiler of the system and Python's headers. Slim containers have neither.
"""

import functools
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

NO_TRITON = "Triton is not installed"


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def no_launch_reason() -> str | None:
    """Why Triton cannot launch kernels, or None: builds its driver, or loads the one it built before."""
    if not has_triton():
        return NO_TRITON
    from triton.runtime import driver

    try:
        driver.active.utils  # noqa: B018 the property builds it
    except Exception as error:  # of several types, by what fails
        message = str(error).partition("\n")[0] or type(error).__name__
        return f"Triton's driver cannot be built: {missing_build_tool() or message}"
    return None


def missing_build_tool() -> str | None:
    """What of a C compiler and Python's headers is missing, or None; where Triton looks for them."""
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang")))):
        return "there is no C compiler on the path, and CC names none"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h is not there (python3-dev has it)"
    return None
