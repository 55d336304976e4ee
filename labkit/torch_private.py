"""Every private name of torch that labkit imports, with its reason.

A new torch may change or remove any of them without notice, so `pyproject.toml` has an upper bound:
the newest version with which `make versions` passed. All were last checked with torch 2.11 and
2.14.1. `tests/test_layout.py` finds private names that are imported elsewhere.

Private attributes of objects are not here, since nothing is imported for them: `Tensor._version`,
`_cdata` of a storage, `_local_tensor` and `_spec` of a DTensor, `_get_backend` of a process group
and `_timeout` of its options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass, _len_torch_dispatch_stack
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import _JoinConfig
from torch.distributed.utils import _apply_to_tensors
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "DisableTorchFunctionSubclass",
    "TorchDispatchMode",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]
# The ledger of allocations, and the list of operators, see every operator through a dispatch mode:
# nothing public does. Trees are the nested outputs and arguments of operators.

# Base classes: isinstance() must also find layers that a user derives from them.
BatchNorm = _BatchNorm
NormBase = _NormBase
ConvNd = _ConvNd
DropoutNd = _DropoutNd

# One kernel for a list of tensors. torch's optimizers use them; the public form is none.
foreach_copy_: Callable[..., Any] = torch._foreach_copy_
foreach_mul_: Callable[..., Any] = torch._foreach_mul_
# Functions that tensors which are parts of a gradient recognize in `__torch_function__`.
FOREACH_NORM: Any = torch._foreach_norm
AMP_CHECK: Any = torch._amp_foreach_non_finite_check_and_unscale_

# Checks a condition on the GPU that computes it, so that the CPU waits for no value.
assert_async: Callable[[Tensor], None] = torch._assert_async

# Calls a function on the tensors in nested containers and dataclasses, as FSDP2 casts its inputs.
apply_to_tensors = _apply_to_tensors

# Changes a tensor without autograd taking values saved for backward as changed.
preserve_version_counter = _unsafe_preserve_version_counter


def set_version_counters(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
    """Set version counters: all-gathering a parameter again does not change what backward saved."""
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)


def has_internal_overlap(tensor: Tensor) -> bool:
    """Return whether several elements share memory, as after expand()."""
    return torch._debug_has_internal_overlap(tensor) == 1


def count_process_groups() -> int:
    """Return how many groups this process is in: torch names groups of their members by it."""
    return len(distributed_c10d._world.pg_names)


def queue_callback(callback: Callable[[], None]) -> None:
    """Call back at the end of the backward pass that runs, as torch's DDP and FSDP2 do."""
    Variable._execution_engine.queue_callback(callback)


def current_autograd_node() -> Any:
    """Return the node that a backward pass runs in this thread, None outside of one."""
    return torch._C._current_autograd_node()


def count_storage_references(tensor: Tensor) -> int:
    """Count tensors, autograd's included, that use the storage, and Python's object for it.

    A bucket's memory can be reused only if no gradient of a caller lies in it.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def is_in_dispatch_mode() -> bool:
    """Return whether a dispatch mode sees operators. Cheap: asked in every collective."""
    return _len_torch_dispatch_stack() > 0


def current_dispatch_mode() -> Any:
    """Return the innermost dispatch mode."""
    return _get_current_dispatch_mode()


def without_dispatch_mode() -> AbstractContextManager[Any]:
    """Leave the innermost dispatch mode for a block: messages must not be replayed by it."""
    return _pop_mode_temporarily()


def broadcast_coalesced(
    group: dist.ProcessGroup, tensors: Sequence[Tensor], n_bytes: int, source: int
) -> None:
    """Broadcast tensors in vectors of at most `n_bytes`, as torch's DDP does."""
    dist._broadcast_coalesced(group, list(tensors), n_bytes, source)  # type: ignore[attr-defined]


def disabled_join_config() -> Any:
    """Return what a `Joinable` holds outside of a `Join`; its public methods cannot reset it."""
    return _JoinConfig.construct_disabled_join_config()


def default_store() -> Any:
    """Return the store by which the ranks met, which works when collectives do not."""
    return distributed_c10d._get_default_store()


def skip_in_compiler(function: Callable[..., Any]) -> None:
    """Let the compiler pass over a frame. Called once the compiler has been imported.

    `torch.compiler.disable` alone compiles the wrapper, for each number of arguments.
    """
    torch._dynamo.decorators.skip(function)


def compiler_limits(recompile_limit: int) -> AbstractContextManager[Any]:
    """Raise the number of graphs per function for a block."""
    return torch._dynamo.config.patch(
        recompile_limit=recompile_limit, accumulated_recompile_limit=4 * recompile_limit
    )


def fresh_compiler_cache() -> AbstractContextManager[Any]:
    """Let the compiler begin with an empty cache in a block. Importing it takes seconds."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def fake_tensor_mode(**options: Any) -> AbstractContextManager[Any]:
    """Let tensors have shapes and no memory in a block; the module is imported at the call."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(**options)


def write_memory_snapshot(run: Callable[[], Any], path: str) -> None:
    """Write the allocations of a call on CUDA as a pickle for pytorch.org/memory_viz.

    The recording of stacks, and the file, have no public name.
    """
    torch.cuda.memory._record_memory_history(max_entries=200_000)
    try:
        run()
        torch.cuda.memory._dump_snapshot(path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
