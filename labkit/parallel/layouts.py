"""How ranks have a parameter: cut, or on several of them.

A parameter says in its attribute `layouts` how the ranks of a group have it. A parameter without a
layout for a group is only on this rank, as a layer of a pipeline is.

Cutting a model by torch's DTensor was measured: autograd through `to_local()` makes a small step
1.4 to 1.5 times as long, and AdamW 1.6 to 1.9 times. Parameters of labkit's wrappers are therefore
tensors of this rank's shape (`labkit.parallel.cut_tensors`). State dicts have DTensors
(`labkit.parallel.tensor`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.cut_tensors import CutParameter, set_cut


@dataclass(frozen=True, eq=False)
class Layout:
    """How the ranks of a group have a parameter."""

    group: dist.ProcessGroup
    dim: int | None = None
    """The dimension in which it is cut; None: some ranks have all of it."""
    copies: int = 1
    """Ranks that have the same values and, after the backward pass, the same gradient."""
    shape: Sequence[int] = ()
    """Of the whole parameter, if it is cut."""

    def __deepcopy__(self, memo: object) -> Layout:
        return self  # a process group cannot be copied

    def __reduce__(self) -> NoReturn:
        raise ValueError("expected tensors without a process group: save a state_dict")


def add_layout(parameter: Tensor, layout: Layout) -> None:
    """Mark how a group has the parameter; replaces an earlier layout for this group."""
    others = [each for each in get_layouts(parameter) if each.group is not layout.group]
    parameter.layouts = (*others, layout)  # type: ignore[attr-defined]
    # FSDP's shards have gradients of a class that does the same
    if layout.dim is not None and not hasattr(parameter, "to_local"):
        parameter.__class__ = CutParameter
        set_cut(parameter, layout.group, layout.dim)


def find_cut(parameter: Tensor) -> Layout | None:
    """Return the layout of the group over which a parameter is cut, if it is."""
    return next((each for each in get_layouts(parameter) if each.dim is not None), None)


def get_layouts(parameter: Tensor) -> tuple[Layout, ...]:
    """Return the layouts of a parameter, at most one per group."""
    return getattr(parameter, "layouts", ())


def each_parameter(module: nn.Module) -> list[nn.Parameter]:
    """Return a module's parameters, each once, in a fifth of the time of `parameters()`.

    For every step: layers may have changed since the last one.
    """
    modules: list[nn.Module | None] = [module]
    parameters: list[nn.Parameter | None] = []
    for each in modules:
        if each is not None:
            modules += each._modules.values()
            parameters += each._parameters.values()
    # By identity: a tensor's hash is a function in Python.
    return [*{id(p): p for p in parameters if p is not None}.values()]


def find_layout(parameter: Tensor, group: dist.ProcessGroup) -> Layout:
    """Return the layout of a parameter for a group; without one, it is on this rank alone."""
    layouts = (each for each in get_layouts(parameter) if each.group is group)
    return next(layouts, Layout(group))
