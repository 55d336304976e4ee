"""States of a cut model and of its optimizer: parts as DTensors, which say where they belong.

Parts have one name on all ranks, so a checkpoint of ordinary tensors would keep one rank's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.layouts import Layout
from labkit.parallel.tensor_collectives import cut, part_lengths
from labkit.parallel.tensor_plan import named_tensors

PREFIX = "module."


@cache
def _find_mesh(group: dist.ProcessGroup, device: str) -> Any:
    from labkit.parallel.sharding.sharded import make_mesh

    return make_mesh(group, device)


def _as_dtensor(part: Tensor, layout: Layout) -> Any:
    from torch.distributed.tensor import DTensor, Shard  # takes half a second

    assert layout.dim is not None
    mesh = _find_mesh(layout.group, part.device.type)
    stride = torch.empty(layout.shape, device="meta").stride()
    return DTensor.from_local(
        part,
        mesh,
        [Shard(layout.dim)],
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=stride,
    )


def save_parts(wrapper: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Hook after a `state_dict`: put parts into it as DTensors."""
    for name, layout in wrapper.layouts_by_name().items():
        key = f"{prefix}{PREFIX}{name}"
        part = state.get(key)
        # FSDP has DTensors of its own
        if layout.dim is not None and part is not None and not hasattr(part, "to_local"):
            state[key] = _as_dtensor(part, layout)


def load_parts(wrapper: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook before loading: take this rank's parts of whole tensors and DTensors.

    Names are the wrapper's or the model's.
    """
    layouts = wrapper.layouts_by_name()
    for name, tensor in named_tensors(wrapper.module):
        key = f"{prefix}{PREFIX}{name}"
        if prefix + name in state:
            state[key] = state.pop(prefix + name)
        layout = layouts.get(name)
        value = state.get(key)
        if value is None or layout is None or layout.dim is None:
            continue  # whole on every rank
        is_part = hasattr(value, "to_local") or value.shape != layout.shape
        if is_part and hasattr(tensor, "to_local"):
            continue  # FSDP takes its rows of this rank's part
        state[key] = _local_part(name, value, layout)


def _short_name(name: str) -> str:
    """Return a parameter's name as torch has it in the state of an optimizer."""
    return name.replace("_orig_mod.", "")  # of a layer that is compiled


def _layouts_by_short_name(wrapper: Any) -> dict[str, Layout]:
    return {_short_name(name): layout for name, layout in wrapper.layouts_by_name().items()}


def get_optimizer_state(wrapper: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state by name, with parts as DTensors."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state: dict[str, Any] = get_optimizer_state_dict(wrapper, optimizer)
    parameters = {_short_name(name): p for name, p in wrapper.named_parameters()}
    layouts = _layouts_by_short_name(wrapper)
    for name, values in state["state"].items():
        layout = layouts[name.removeprefix(PREFIX)]
        for key, value in values.items():
            if layout.dim is None or not isinstance(value, Tensor) or not value.dim():
                continue  # the same on every rank
            if hasattr(value, "to_local") or value.shape != parameters[name].shape:
                raise ValueError(
                    f"expected an optimizer that treats each element of {name} alone, without FSDP;"
                    f" its {key} is {tuple(value.shape)}"
                )
            values[key] = _as_dtensor(value, layout)
    return state


def set_optimizer_state(
    wrapper: Any, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Load an optimizer's state by name: this rank's parts of DTensors or whole tensors.

    Names are the wrapper's or the model's. ValueError for one that the model lacks.
    """
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    layouts = _layouts_by_short_name(wrapper)
    by_name: dict[str, Any] = {}
    for full_name, values in state["state"].items():
        name = full_name.removeprefix(PREFIX)
        if name not in layouts:
            raise ValueError(f"expected a state of this model's parameters, got one of {name}")
        layout = layouts[name]
        by_name[PREFIX + name] = dict(values)
        for key, value in values.items():
            if layout.dim is not None and isinstance(value, Tensor) and value.dim():
                by_name[PREFIX + name][key] = _local_part(f"{name} {key}", value, layout)
    groups = []
    for group in state["param_groups"]:
        names = [PREFIX + name.removeprefix(PREFIX) for name in group["params"]]
        groups.append({**group, "params": names})
    set_optimizer_state_dict(wrapper, optimizer, {"state": by_name, "param_groups": groups})


def _local_part(name: str, value: Any, layout: Layout) -> Tensor:
    """Return this rank's part of a whole tensor or DTensor. ValueError for a part."""
    assert layout.dim is not None
    if hasattr(value, "to_local"):
        length = part_lengths(layout.shape[layout.dim], layout.group.size())[layout.group.rank()]
        local: Tensor = value.to_local()
        return local if local.shape[layout.dim] == length else cut(value.full_tensor(), layout)
    if value.shape != layout.shape:
        # a file of parts, which have one name on all ranks, may have another rank's
        got = f"a part, {tuple(value.shape)}"
        raise ValueError(f"expected all of {name}, {tuple(layout.shape)}, got {got}")
    return cut(value, layout)
