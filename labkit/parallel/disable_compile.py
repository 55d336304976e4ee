"""A decorator for functions that torch must neither trace nor replay, since they communicate with other processes."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

P = ParamSpec("P")
R = TypeVar("R")


def disable_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Hide the function from selective checkpoints and, if the program has imported it, from the compiler."""
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _len_torch_dispatch_stack() and type(_get_current_dispatch_mode()).__module__ == "torch.utils.checkpoint":
            with _pop_mode_temporarily():
                return call(*args, **kwargs)
        if "torch._dynamo" not in sys.modules:  # nothing is compiled; to import it takes seconds
            return function(*args, **kwargs)
        if not disabled:
            torch._dynamo.decorators.skip(call)  # else it is compiled for each function and number of arguments
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call
