"""A decorator for functions that torch.compile must not trace, since they communicate with other processes."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def disable_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Apply `torch.compiler.disable` without importing the compiler, which takes seconds, unless the program has."""
    disabled: list[Callable[P, R]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:  # nothing is compiled
            return function(*args, **kwargs)
        if not disabled:
            torch._dynamo.decorators.skip(call)  # else it is compiled for each function and number of arguments
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call
