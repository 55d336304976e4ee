"""The implementations of attention by name, and where each can run.

Naive attention is called "explicit" in the table, as in recorded runs.
"""

import importlib.util
import shutil
import sysconfig
import warnings
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from labkit.nn.attention import Attention, check_attention_inputs, naive_attention, query_group
from labkit.nn.tiled_attention import TiledAttention
from labkit.torch_private import compiler_limits

# Graphs that `torch.compile` may make of naive attention in a process; PyTorch's limit is 8.
GRAPH_LIMIT = 256
NO_TRITON = "Triton is not installed"


def _compiled(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """`torch.compile` of naive attention, one graph per shape.

    A sweep has more shapes than the 8 graphs a function gets by default. Beyond the raised limit
    `fullgraph` raises, and torch does not silently return to eager mode.
    """
    check_attention_inputs(q, k, v)
    with compiler_limits(GRAPH_LIMIT):
        return _compiled_naive()(q, k, v, causal)


@cache
def _compiled_naive() -> Attention:
    return torch.compile(naive_attention, fullgraph=True, dynamic=False)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from labkit.nn.flash_attention import flash_attention  # needs Triton

    return flash_attention(q, k, v, causal)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, *, backend: SDPBackend | None = None
) -> Tensor:
    check_attention_inputs(q, k, v)
    # The fused backends want exactly (batch, heads, sequence, head_dim).
    q4, k4, v4 = (x.reshape(1, -1, *x.shape[-2:]) if x.dim() != 4 else x for x in (q, k, v))
    is_grouped = query_group(q, k) > 1
    with nullcontext() if backend is None else sdpa_kernel(backend):
        output = scaled_dot_product_attention(q4, k4, v4, is_causal=causal, enable_gqa=is_grouped)
    return output.reshape(q.shape)


def no_compiler_reason(device_type: str) -> str | None:
    """Return why `torch.compile` cannot compile for "cpu" or "cuda" here, or None."""
    if device_type == "cuda":
        reason = no_launch_reason()
        return f"torch.compile needs Triton on a GPU: {reason}" if reason is not None else None
    if device_type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        return "torch.compile needs a C++ compiler on a CPU; there is none on the path"
    return None


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def no_launch_reason() -> str | None:
    """Return why Triton cannot launch kernels, or None.

    Its launcher is C that it builds with the system's compiler and Python's headers, which slim
    containers lack.
    """
    if not has_triton():
        return NO_TRITON
    from triton.runtime import driver

    try:
        driver.active.utils  # noqa: B018 the property builds it, or loads the one built before
    except Exception as error:  # of several types, by what fails
        message = str(error).partition("\n")[0] or type(error).__name__
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            message = "Python.h is not there (python3-dev has it)"
        return f"Triton's driver cannot be built: {message}"
    return None


def unavailable_reason(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Return why an implementation cannot run there, or None.

    SDPA is tried. A user's may still fail when it runs.
    """
    if name == "compiled":
        return no_compiler_reason(device.type)
    if name in SDPA_BACKENDS:
        return _try_reason(IMPLEMENTATIONS[name], device, dtype, head_dim)
    if name != "flash":
        return None
    if not has_triton():
        return NO_TRITON
    from labkit.nn import flash_attention
    from labkit.nn.flash_launch import INTERPRETED

    reason = flash_attention.unavailable_reason(device, dtype, head_dim)
    # Triton's interpreter launches nothing.
    if reason is not None or INTERPRETED:
        return reason
    return no_launch_reason()


def _try_reason(
    attend: Attention, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Try forward and backward of a small problem; PyTorch's error and warnings are the reason."""
    # An SDPA backend says in warnings why it does not take the inputs, and raises without them.
    with warnings.catch_warnings(record=True) as caught, torch.enable_grad():
        warnings.simplefilter("always")
        try:
            q, k, v = torch.zeros(
                3, 1, 2, 64, head_dim, device=device, dtype=dtype
            ).requires_grad_()
            attend(q, k, v, False).sum().backward()
        except Exception as error:  # of any type: backends call several libraries
            message = str(error).partition("\n")[0] or type(error).__name__
            # Then no kernel has looked at the inputs, and torch's message only guesses why.
            if message.startswith("No viable backend") and not caught:
                return f"PyTorch has no such backend for {device.type} tensors"
            return " ".join([message, *(str(warning.message) for warning in caught)])
    return None


SDPA_BACKENDS = {
    "sdpa_math": SDPBackend.MATH,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa": None,  # torch's choice
}
# (q, k, v, causal) -> output, differentiable, by name; `register` adds a user-defined one.
IMPLEMENTATIONS: dict[str, Attention] = {
    "explicit": naive_attention,
    "compiled": _compiled,
    "tiled": TiledAttention.apply,
    "flash": _flash,
    **{name: partial(_sdpa, backend=backend) for name, backend in SDPA_BACKENDS.items()},
}
RESERVED = frozenset(IMPLEMENTATIONS)


def register(name: str, attend: Attention) -> dict[str, Attention]:
    """Add a user-defined attention: (q, k, v, causal) -> output, each (batch, sequence, head_dim).

    Its scale is 1/sqrt(head_dim), and it must be differentiable. ValueError for a name that is
    taken.
    """
    if name in RESERVED:
        raise ValueError(f"expected a name other than {', '.join(sorted(RESERVED))}")
    IMPLEMENTATIONS[name] = attend
    return IMPLEMENTATIONS
