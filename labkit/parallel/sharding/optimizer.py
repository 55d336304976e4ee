"""ZeRO-1: an optimizer whose state and update are sharded over data-parallel ranks.

    model = BucketedDDP(model)         gradients become the mean over ranks
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    ...
    optimizer.step()                   each rank updates its rows, then gathers the others'

Every rank has all parameters and all gradients, which must be the same everywhere when `step` is
called. A rank keeps 1/p of the optimizer's state, two values per parameter for AdamW. On top of
averaging gradients, a step moves (p-1)/p of the parameters' bytes per rank, and saves (p-1)/p of
the update. The optimizer sees rows as DTensors, so that norms and products are those of whole
parameters.

Source: Rajbhandari, Rasley, Ruwase & He 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", arXiv:1910.02054, section 5.1 (P_os) and, for the bytes sent, 7.2. The paper
reduce-scatters gradients; here a wrapper has averaged them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.optim import Optimizer

from labkit.parallel.agreement import agree_once, describe_parameter
from labkit.parallel.prepare import disable_compile
from labkit.parallel.sharding.gather import local_rows, plan_all_gather
from labkit.parallel.sharding.sharded import (
    SHARD,
    as_gradient,
    as_rows,
    check_shard,
    check_shardable,
    consolidate,
    make_mesh,
    shard_parameter,
)
from labkit.parallel.transport import AUTO, find_transport, member_group

MAX_FOREACH = 300  # parameters per operator: DTensor's first such call takes time in their square
REFUSED: Mapping[type[Optimizer], str] = {
    optim.LBFGS: "its search direction depends on all parameters together",
    optim.SparseAdam: "it is made for sparse gradients",
    optim.Rprop: "torch's DTensor does not know its masks",
    optim.Adafactor: "torch's DTensor does not know its means over rows and columns",
}


class ShardedOptimizer(Optimizer):
    """`optimizer_cls(params, **settings)` with 1/p of the state on each rank.

    Args:
        params: parameters, or groups of them, as for any optimizer; the same on all ranks, on one
            device, dense.
        optimizer_cls: the optimizer, which gets this rank's rows of each parameter.
        group: the process group; None: all ranks.
        transport: as for `labkit.parallel.collectives.all_gather`.
        settings: of `optimizer_cls`.

    `param_groups` have whole parameters and may be changed at any time, by schedulers for example.
    Frozen parameters send nothing. State dicts are torch's, with DTensors of this rank's rows.

    Raises ValueError, on all ranks of the group, for an optimizer that cannot be sharded, for
    unsuitable parameters, and for arguments that differ between ranks; on a rank outside the group;
    in `step` for sparse gradients.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_cls: Callable[..., Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        transport: str = AUTO,
        **settings: Any,
    ):
        members = member_group(group)
        self._group = group
        self._transport = transport
        self._rank = members.rank()
        self._world_size = members.size()
        self._shard = f"rank {members.rank()} of {members.size()}"
        # The optimizer of shards, whose groups and state are this one's.
        self._inner: Any = None
        # This rank's rows of each parameter, views of its memory: the inner optimizer's parameters.
        self._shards: dict[Tensor, Any] = {}
        # Addresses, shapes and strides for which `_gather_rows` is planned.
        self._gathered_layouts: list[tuple[int, torch.Size, tuple[int, ...]]] = []

        def build() -> None:
            super(ShardedOptimizer, self).__init__(params, {})
            for refused, reason in REFUSED.items():
                if isinstance(optimizer_cls, type) and issubclass(optimizer_cls, refused):
                    raise ValueError(f"{optimizer_cls.__name__} cannot be sharded: {reason}")
            self._check_parameters()
            self._mesh = make_mesh(members, self._parameters[0].device.type)
            self._make_shards()
            with self._groups_of_shards():
                self._inner = optimizer_cls(self.param_groups, **settings)
                self.defaults = self._inner.defaults
                self.state = self._inner.state
                self.param_groups = self._inner.param_groups

        self._run_on_all_ranks(
            build, {"class": getattr(optimizer_cls, "__name__", ""), "transport": transport}
        )
        if members.size() > 1:
            # ValueError now, not at the first step
            find_transport(group, self._parameters[0].device, transport)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. A collective. ValueError, on all ranks, as at construction;
        nothing is changed."""
        if self._inner is None:  # the base class adds the first groups
            super().add_param_group(param_group)
            return
        number = len(self.param_groups)

        def add() -> None:
            super(ShardedOptimizer, self).add_param_group(param_group)
            self._check_parameters()
            self._make_shards()
            with self._groups_of_shards():
                self._inner.add_param_group(self.param_groups.pop())

        try:
            self._run_on_all_ranks(add, {})
        except BaseException:
            del self.param_groups[number:]
            self._shards = {p: self._shards[p] for p in self._parameters}
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters. A collective. A closure is called once, on every rank, and its
        loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in self._parameters):
            raise ValueError("expected dense gradients, got a sparse one")
        for p, shard in self._shards.items():
            # a user may have replaced the parameter's data
            shard._local_tensor = local_rows(p.detach(), self._rank, self._world_size)
            shard.grad = None
            if p.grad is not None:
                gradient = p.grad.detach().as_subclass(Tensor)
                rows = local_rows(gradient, self._rank, self._world_size)
                shard.grad = as_gradient(rows, shard)
        undecided_groups = [group for group in self.param_groups if may_use_foreach(group)]
        try:
            # With foreach, an operator is one call for all DTensors.
            for group in undecided_groups:
                group["foreach"] = True
            with self._groups_of_shards():
                self._inner.step()
        finally:
            for group in undecided_groups:
                group["foreach"] = None
            for p, shard in self._shards.items():
                shard.grad = None
                own = local_rows(p.detach(), self._rank, self._world_size)
                # The optimizer may have replaced the shard's data.
                if shard._local_tensor.data_ptr() != own.data_ptr():
                    own.copy_(shard._local_tensor)
        self.gather_parameters()
        return loss

    @disable_compile
    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Gather the ranks' rows of every parameter that a step may have changed. A collective."""
        changed = [p for p in self._parameters if p.requires_grad or p.grad is not None]
        if self._world_size == 1 or not changed:
            return
        layouts = [(p.data_ptr(), p.shape, p.stride()) for p in changed]
        if layouts != self._gathered_layouts:
            with torch.inference_mode(False):  # its vectors stay
                transport = find_transport(self._group, changed[0].device, self._transport)
                self._gather_rows = plan_all_gather(
                    "parameters", [p.detach() for p in changed], transport
                )
                self._gathered_layouts = layouts
        self._gather_rows()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's layout with this rank's rows as DTensors: as many ranks load it, each its
        own."""
        with self._groups_of_shards():
            # a key, of which checkpoints keep each rank's
            return {**super().state_dict(), SHARD: {self._shard: True}}

    def consolidated_state_dict(self, *, to: int | None = 0) -> dict[str, Any] | None:
        """Return the `state_dict` of an unsharded `optimizer_cls`, on group rank `to` or on all
        (None).

        A collective; None on the other ranks. Tensors are on the CPU. It loads into an unsharded
        optimizer, and into a sharded one on any number of ranks, as an unsharded optimizer's
        `state_dict` does.
        """
        state = {name: value for name, value in self.state_dict().items() if name != SHARD}
        return consolidate(state, to in (None, self._rank))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict()` of this rank, or an unsharded state, of which this rank takes its
        rows.

        ValueError for the shard of another rank or number of ranks, and for other parameter groups.
        """
        for label in state_dict.get(SHARD, ()):
            check_shard(label, self._shard)
        with self._groups_of_shards():
            super().load_state_dict(state_dict)
            self._inner.param_groups = self.param_groups
            self._inner.state = self.state
        for shard, state in self.state.items():
            if not shard.dim():  # a scalar has no rows
                continue
            for name, value in state.items():
                if getattr(value, "shape", None) == shard.shape:
                    state[name] = as_rows(name, value, shard)

    def __getstate__(self) -> NoReturn:
        raise TypeError("a sharded optimizer is tied to its ranks: save its state_dict()")

    @property
    def _parameters(self) -> list[Any]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _check_parameters(self) -> None:
        parameters = self._parameters
        if (
            not parameters
            or len({p.device for p in parameters}) != 1
            or len(set(parameters)) != len(parameters)
        ):
            raise ValueError("expected one parameter or more, on one device, each once")
        check_shardable(
            ((f"parameter {number}", p) for number, p in enumerate(parameters)), are_averaged=False
        )

    def _run_on_all_ranks(self, action: Callable[[], None], settings: dict[str, object]) -> None:
        """Run the action, and compare the parameter groups between ranks. If one rank raises, all
        raise."""

        def describe() -> dict[str, object]:
            try:
                action()
            except TypeError as error:  # torch's, for an argument that its optimizer does not have
                raise ValueError(str(error)) from error
            description = dict(settings)
            for number, group in enumerate(self.param_groups):
                for name, value in group.items():
                    if isinstance(value, bool | int | float | str | tuple):
                        description[f"{name} of group {number}"] = value
                for index, parameter in enumerate(group["params"]):
                    name = f"parameter {index} of group {number}"
                    description[name] = describe_parameter(parameter)
            return description

        agree_once("optimizer", describe, self._group)

    def _make_shards(self) -> None:
        for p in self._parameters:
            if p not in self._shards:
                self._shards[p] = shard_parameter(
                    p, local_rows(p.detach(), self._rank, self._world_size), self._mesh
                )

    @contextmanager
    def _groups_of_shards(self) -> Iterator[None]:
        """Put shards into the groups in place of parameters: the groups are the inner optimizer's,
        too."""
        for group in self.param_groups:
            group["params"] = [self._shards[p] for p in group["params"]]
        try:
            yield
        finally:
            parameters = {shard: p for p, shard in self._shards.items()}
            for group in self.param_groups:
                group["params"] = [parameters[shard] for shard in group["params"]]


def may_use_foreach(group: Mapping[str, Any]) -> bool:
    """Return whether a parameter group may call each operator once for all of its parameters, and
    leaves it open."""
    is_open = (
        group.get("foreach", False) is None
        and not group.get("fused")
        and not group.get("differentiable")
    )
    has_tensors = any(isinstance(value, Tensor) for value in group.values())  # lr as a tensor
    return is_open and not has_tensors and len(group["params"]) <= MAX_FOREACH
