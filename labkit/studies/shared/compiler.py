"""Compiles a sum, so that what is compiled next in this process finds the compiler tried.

torch tests which instructions the compiler and this processor have, and compiles its headers: 15 s on two cores, once
for a user: the results stay in torch's cache.
"""

from functools import cache

import torch


@cache
def prepare_compiler(device: str) -> None:
    """Try the C++ compiler, on a CPU. Raises what torch raises."""
    if torch.device(device).type == "cpu":
        torch.compile(torch.neg)(torch.zeros(64))
        torch._dynamo.reset()
