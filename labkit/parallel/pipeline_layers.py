"""Layers of a pipeline apart from their passes: measuring, tied gradients, state."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.agreement import agree_once, describe_parameter
from labkit.parallel.collectives import all_reduce
from labkit.parallel.data_parallel.consistency import broadcast
from labkit.parallel.exchange import exchange
from labkit.parallel.layouts import Layout, add_layout, find_cut, get_layouts
from labkit.parallel.messages import gather_json
from labkit.parallel.transport import Transport


def measure_layers(
    layers: Sequence[nn.Module],
    inputs: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    repeats: int = 3,
) -> list[float]:
    """Return the seconds of each layer's forward pass: best of `repeats`, mean over ranks.

    A collective. Running statistics and random number generators are as before.
    """
    seconds = torch.zeros(len(layers), dtype=torch.float64, device=inputs.device)
    devices = [inputs.device] if inputs.is_cuda else []
    # Dropout draws numbers, which the training would miss.
    with torch.no_grad(), torch.random.fork_rng(devices):
        for number, layer in enumerate(layers):
            times = []
            with on_copies_of_buffers(layer):
                for _ in range(repeats):
                    start = time.perf_counter()
                    outputs = layer(inputs)
                    if inputs.is_cuda:
                        torch.cuda.synchronize(inputs.device)
                    times.append(time.perf_counter() - start)
            inputs = outputs
            # The best, since a stall only adds.
            seconds[number] = min(times)
    # The mean of ranks, which must balance stages alike.
    all_reduce(seconds, group)
    return seconds.tolist()


@contextmanager
def on_copies_of_buffers(model: nn.Module) -> Iterator[None]:
    """Let a model compute on copies of its buffers, so that running statistics stay as they are.

    Buffers are replaced, not overwritten afterwards: a graph may have saved them.
    """
    originals = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in originals:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in originals:
            setattr(module, name, buffer)


def find_tied(
    layers: Sequence[nn.Module], stages: Sequence[range], ranks: int, prefix: str
) -> list[dict[int, str]]:
    """Return each parameter that several ranks have: its name on each of them, by rank."""
    names: dict[nn.Parameter, dict[int, str]] = {}
    for stage, numbers in enumerate(stages):
        for number in numbers:
            for name, parameter in layers[number].named_parameters():
                by_rank = names.setdefault(parameter, {})
                by_rank.setdefault(stage % ranks, f"{prefix}{number}.{name}")
    return [dict(sorted(by_rank.items())) for by_rank in names.values() if len(by_rank) > 1]


def check_cuts(layers: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise ValueError for a layer that is cut over ranks of the pipeline.

    Only the rank with its stage would compute it, and wait for the others' parts.
    """
    ranks = {*dist.get_process_group_ranks(group)}
    for name, parameter in layers.named_parameters():
        layout = find_cut(parameter)
        if layout is None:
            continue
        common = ranks.intersection(dist.get_process_group_ranks(layout.group))
        if len(common) > 1:
            raise ValueError(
                f"expected layers that are cut over other ranks than the pipeline's: {name} is cut"
                f" over ranks {sorted(common)}, which have different stages"
            )


def mark_replicated(whole: nn.Module, local: nn.Module) -> list[dist.ProcessGroup]:
    """Make layers that are not cut the same on tensor-parallel ranks; return these ranks' groups.

    Their gradients are then equal on these ranks, and `clip_grad_norm_` counts each once. `local`:
    this rank's layers of the whole list. A collective.
    """
    cuts = [find_cut(parameter) for parameter in whole.parameters()]
    groups = [*dict.fromkeys(layout.group for layout in cuts if layout is not None)]
    for group in groups:
        # all layers, since a stage without the one that differs would go on
        described = {
            name: describe_parameter(parameter)
            for name, parameter in whole.named_parameters()
            if not _has_layout(parameter, group)
        }
        agree_once("pipeline", described.copy, group)
        replicated = [each for each in local.parameters() if not _has_layout(each, group)]
        broadcast(replicated, group)
        for parameter in replicated:
            add_layout(parameter, Layout(group, copies=group.size()))
    return groups


def _has_layout(parameter: nn.Parameter, group: dist.ProcessGroup) -> bool:
    return any(layout.group is group for layout in get_layouts(parameter))


def sum_tied(
    parameter: nn.Parameter, owners: list[int], group: dist.ProcessGroup, transport: Transport
) -> None:
    """Sum a gradient over the ranks that have the parameter, in the order of ranks."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.layout is not torch.strided:
        parameter.grad = parameter.grad.to_dense()
    gradient: Any = parameter.grad
    shard = getattr(gradient, "_local_tensor", gradient)  # FSDP's, the same rows on these ranks
    local = shard.contiguous()
    number = len(owners)
    place = owners.index(group.rank())
    # All parts are kept and added in the order of ranks, so that copies stay equal to the bit.
    parts = [local if i == place else torch.empty_like(local) for i in range(number)]
    for distance in range(1, number):
        to = owners[(place + distance) % number]
        source = (place - distance) % number
        exchange(local, to, parts[source], owners[source], group, transport=transport)
    shard.copy_(torch.stack(parts).sum(0))


@contextmanager
def gradients_set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Begin without gradients inside, and add those from before at the end, in place.

    After an error, gradients are those from before.
    """
    earlier = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    added: list[Tensor | None] = [None] * len(parameters)
    try:
        yield
        added = [parameter.grad for parameter in parameters]
    finally:
        for parameter, before, gradient in zip(parameters, earlier, added, strict=True):
            if before is not None and gradient is not None:
                before += gradient
            parameter.grad = gradient if before is None else before


def gather_state(
    local: Mapping[str, Tensor], group: dist.ProcessGroup, device: torch.device
) -> dict[str, Tensor]:
    """Return the tensors of all ranks by name, on every rank. A collective."""
    whole: dict[str, Tensor] = {}
    described = [(name, [*value.shape], str(value.dtype)) for name, value in local.items()]
    for rank, tensors in enumerate(gather_json(described, group)):
        for name, shape, dtype in tensors:
            if rank == group.rank():
                whole[name] = local[name].clone()
            else:
                torch_dtype = getattr(torch, dtype.removeprefix("torch."))
                whole[name] = torch.empty(shape, dtype=torch_dtype, device=device)
        broadcast([whole[name] for name, _, _ in tensors], group, rank)
    return whole


def gather_shapes(
    local: Mapping[str, Tensor], group: dist.ProcessGroup, prefix: str
) -> dict[str, torch.Size]:
    """Return the shapes of all ranks' tensors, by name without `prefix`. A collective."""
    shapes = {name.removeprefix(prefix): [*value.shape] for name, value in local.items()}
    by_rank = gather_json(shapes, group)
    return {name: torch.Size(size) for each in by_rank for name, size in each.items()}


def check_state(state: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> None:
    """Raise ValueError unless a state has tensors of these names and shapes, and no others."""
    for name in {**shapes, **state}:
        got = getattr(state.get(name), "shape", None)
        if name not in shapes or got != shapes[name]:
            expected = shapes.get(name, "no such name")
            raise ValueError(f"expected a state with {name}: {expected}, got {got}")
