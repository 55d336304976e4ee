"""ZeRO-3: parameters, gradients and optimizer state in shards; a layer is whole only while it is computed with.

    model = FSDP(model)                                      units: layers, each cut into a shard per rank
    optimizer = torch.optim.AdamW(model.parameters())        of this rank's shards
    loss = criterion(model(inputs), targets)
    loss.backward()                                          when it returns, shards have the mean gradient over ranks
    optimizer.step()

With Psi bytes of parameters, each rank sends Psi (p-1)/p bytes three times per step: to gather for the forward pass, to
gather for the backward pass, and to average gradients. With `reshard_after_forward=False` whole parameters stay until
backward has used them: two times, as an all-reduce does. Parameters of fewer than two dimensions (biases, norms) are
small: every rank has them whole, and averages their gradients at the end of the pass, all together.

In float32 two ranks end, to the bit, where one process does that adds up the gradients of their batches one after the
other. One process that takes both batches at once may round differently: its products are of larger matrices.

Sources: Rajbhandari, Rasley, Ruwase & He 2020, arXiv:1910.02054, section 5.3 (P_os+g+p) and, for what is sent, 7.2;
Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277, for units and prefetching.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from labkit.parallel.background_comm import Channel
from labkit.parallel.data_parallel.consistency import check_same_on_all_ranks, describe, device_of
from labkit.parallel.prepare import FLOAT_TYPES
from labkit.parallel.sharding.building import Initialize, check_module, make_units, reset_parameters
from labkit.parallel.sharding.norms import clip_by_global_norm
from labkit.parallel.sharding.saving import (
    load_optimizer_state,
    shares_of,
    whole_optimizer_state,
    whole_parameters,
)
from labkit.parallel.sharding.schedule import Schedule
from labkit.parallel.sharding.units import Units, find_units
from labkit.parallel.transport import AUTO
from labkit.parallel.transport.select_transport import member_group

PREFIX = "module."
SHARD = "_extra_state"  # torch's name for what a state_dict holds besides tensors


class FSDP(nn.Module):
    """A module whose parameters are in shards. `module` is the model; it is changed, and used through this only.

    Args:
        module: the same on all ranks but for its values, which become those of rank 0. On the meta device, it is made
            real a unit at a time, so that no rank ever holds all of it.
        compute_dtype: of parameters and floating-point inputs of units while they are computed with, and of what is
            sent; shards and their gradients keep the parameters' own. None: the same.
        units: modules, or classes of modules, whose parameters are gathered together. None: the items of the outermost
            lists and sequences (layers), and beside these whatever has parameters. Parameters that are in no unit, or
            in several, belong to the model's own unit, which is whole from its first layer to its last.
        reshard_after_forward: give whole parameters back after a unit's forward pass, and gather them again for
            its backward pass.
        prefetch: how many units are gathered ahead, in the order of the forward pass before.
        group: the process group; None: all ranks.
        replicate_below: parameters of fewer dimensions are not cut; 0 cuts all.
        elementwise: cut parameters at any element, for optimizers that update each by itself (AdamW, SGD, ...). False:
            at their borders, for those that need whole parameters (Adafactor, Muon, ...).
        initialize: fills in the own parameters and buffers of each module on the meta device, once they have memory.
            None: its `reset_parameters()`.
        finish_in_backward: if False, `backward()` may return before gradients are averaged, and the caller calls
            `finish_gradient_synchronization()` after each.
        transport: as for `labkit.parallel.collectives.all_gather`.

    `parameters()` are this rank's shards, under the model's own names: vectors, without an element where this rank has
    nothing of a parameter, in the parameter's shape where it has all of it. Make the optimizer of these. A parameter
    without a gradient on any rank gets none. All ranks must run the same units in the same order, forward and backward;
    inside of a unit they may differ. Whole parameters can be read only while their unit runs.

    Raises ValueError, on all ranks of the group, if nothing is trained, for arguments that cannot work or differ
    between ranks, and for models that differ, as the data-parallel wrappers do; in backward for sparse gradients.
    RuntimeError, after backward, if ranks have run different units.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        units: Units | None = None,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        group: dist.ProcessGroup | None = None,
        replicate_below: int = 2,
        elementwise: bool = True,
        initialize: Initialize | None = None,
        finish_in_backward: bool = True,
        transport: str = AUTO,
    ):
        members = member_group(group)
        super().__init__()
        self.module = module
        fill = initialize or reset_parameters
        tensors = [*module.named_parameters(), *module.named_buffers()]
        device = next((tensor.device for _, tensor in tensors if not tensor.is_meta), device_of(group))
        refused: Exception | None = None
        found: list[nn.Module] = []
        try:
            _check_arguments(compute_dtype, prefetch)
            found = find_units(module, units)
            check_module(module, device, fill)
        except Exception as error:
            refused = error
        settings = {
            "compute_dtype": compute_dtype,
            "units": [_place(module, unit) for unit in found],
            "reshard_after_forward": reshard_after_forward,
            "prefetch": prefetch,
            "replicate_below": replicate_below,
            "elementwise": elementwise,
            "finish_in_backward": finish_in_backward,
            "transport": transport,
        }
        described = [describe(name, tensor) for name, tensor in tensors]
        check_same_on_all_ranks("model", settings, described, device, group, refused)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError("expected a module with at least one parameter that requires a gradient")
        self._group, self._device = group, device
        self._gathers, reductions = (Channel(group, device, transport) for _ in range(2))
        self._units = make_units(
            found,
            group=members,
            device=device,
            compute_dtype=compute_dtype,
            replicate_below=replicate_below,
            elementwise=elementwise,
            initialize=fill,
        )
        self._schedule = Schedule(
            self._units,
            self._gathers,
            reductions,
            compute_dtype=compute_dtype,
            reshard_after_forward=reshard_after_forward,
            prefetch=prefetch,
            finish_in_backward=finish_in_backward,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's. Whether the next backward pass averages gradients is decided here, as with torch's wrappers."""
        self._schedule.begin_forward()
        try:
            return self.module(*args, **kwargs)
        finally:
            self._schedule.end_forward()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Over whose ranks parameters are shared out; None: all."""
        return self._group

    @property
    def transport_in_use(self) -> tuple[str, str]:
        """What carries parameters and gradients, and why it is not shared memory, if it is not."""
        return self._gathers.in_use

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Passes whose forward runs in here add to local gradients, of whole parameters, which take their memory.

        The next pass outside averages the sum.
        """
        before, self._schedule.synchronize = self._schedule.synchronize, False
        try:
            yield
        finally:
            self._schedule.synchronize = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the shards, and what passes under `no_sync` have left."""
        super().zero_grad(set_to_none)
        for flat in (flat for unit in self._units for flat in unit.flats):
            flat.unreduced.clear()

    def finish_gradient_synchronization(self) -> None:
        """Return once every shard has the mean of the last backward pass's gradients over ranks. Idempotent."""
        self._schedule.finish()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over the shards of all ranks: the norm before, float64, a scalar.

        A collective.
        """
        gradients: dict[bool, list[Tensor]] = {True: [], False: []}
        for flat in (flat for unit in self._units for flat in unit.flats):
            gradients[flat.is_replicated] += [shard.grad for shard in flat.shards if shard.grad is not None]
        return clip_by_global_norm(gradients[False], gradients[True], max_norm, norm_type, self._group, self._device)

    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Whole parameters by the bare module's names, on every rank, in their own dtype. A collective."""
        found = {slot.names[0]: whole.clone() for slot, whole in whole_parameters(self._units, self._gathers)}
        return {name: found[name] for name, _ in self.module.named_parameters()}

    def get_extra_state(self) -> dict[str, Any]:
        """Which shard a `state_dict` holds."""
        pieces = [[list(piece) for piece in flat.own_pieces] for unit in self._units for flat in unit.flats]
        return {"rank": dist.get_rank(self._group), "world_size": dist.get_world_size(self._group), "pieces": pieces}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Before a shard is loaded. ValueError for another than this rank's."""
        own = self.get_extra_state()
        if state["pieces"] != own["pieces"] or (state["rank"], state["world_size"]) != (own["rank"], own["world_size"]):
            raise ValueError(
                f"expected the shard of rank {own['rank']} of {own['world_size']}, or what consolidated_state_dict() "
                f"returns; got the shard of rank {state['rank']} of {state['world_size']}"
            )

    def consolidated_state_dict(self, *, to: int | None = 0) -> dict[str, Any] | None:
        """The bare module's `state_dict`, on the CPU of group rank `to`, or of all (None); None on the others.

        A collective, a unit at a time; buffers are the rank's own. It loads into the bare module, and into this one on
        any number of ranks. (`state_dict()`, no collective, is this rank's shard, for as many ranks to go on from.)
        """
        is_asked, found = to in (None, dist.get_rank(self._group)), dict[str, Any]()
        for slot, whole in whole_parameters(self._units, self._gathers):
            if is_asked:
                found |= dict.fromkeys(slot.names, whole.detach().to("cpu", copy=True))
        if not is_asked:
            return None
        state = self.module.state_dict()
        return {name: found.get(name, value) for name, value in state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """This rank's own shard, or the bare module's state, of which this rank takes its share.

        ValueError for the shard of another rank, or of another number of ranks, and for parameters of other shapes.
        """
        if assign:
            raise ValueError("expected assign=False: shards are parts of their units' memory")
        if SHARD not in state_dict:
            shares = shares_of(self._units, state_dict)
            state_dict = {PREFIX + name: value for name, value in shares.items()} | {SHARD: self.get_extra_state()}
        return super().load_state_dict(state_dict, strict)

    def consolidated_optimizer_state_dict(self, optimizer: Optimizer, *, to: int | None = 0) -> dict[str, Any] | None:
        """The state of an optimizer of these shards, as the same one over whole parameters would give it.

        On the CPU of group rank `to`, or of all (None); None on the others. A collective.
        """
        return whole_optimizer_state(self._units, optimizer, self._group, to)

    def load_optimizer_state_dict(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """This rank's share of a whole state, on any number of ranks. ValueError for other parameter groups."""
        load_optimizer_state(self._units, optimizer, state_dict)

    def _apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("expected the module where it is to be, and in its dtype, before it is wrapped")

    def __getstate__(self) -> NoReturn:
        raise TypeError("a sharded module is one with those of other processes: save its state_dict()")


def _check_arguments(compute_dtype: torch.dtype | None, prefetch: int) -> None:
    if compute_dtype is not None and compute_dtype not in FLOAT_TYPES:
        raise ValueError(f"compute_dtype must be one of {', '.join(map(str, FLOAT_TYPES))}; got {compute_dtype}")
    if prefetch < 0:
        raise ValueError(f"expected to prefetch 0 units or more, got {prefetch}")


def _place(module: nn.Module, unit: nn.Module) -> str:
    return next(name for name, each in module.named_modules() if each is unit)
