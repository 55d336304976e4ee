"""ZeRO-1: an optimizer whose state and whose work are shared out over data-parallel ranks.

    model = BucketedDDP(model)                          gradients become the mean over ranks
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    ...
    optimizer.step()                                    each rank updates its rows, then all get all of them

Every rank has all parameters and all gradients, which must be the same everywhere when `step` is called. Of the
optimizer's state, two values per parameter for AdamW, it has 1/p. A step moves (p-1)/p of the parameters' bytes per
rank beyond what averaging gradients does, and spares (p-1)/p of the update. To the optimizer, rows are DTensors: what
it does with norms and products of parameters, it does with whole ones.

Source: Rajbhandari, Rasley, Ruwase & He 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054, section 5.1 (P_os) and, for what is sent, 7.2. The paper reduce-scatters gradients for it; here they
have been averaged by a wrapper. A `ReduceScatterDDP` does as the paper, and makes ZeRO-2 of it.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from labkit.parallel.data_parallel.consistency import check_same_on_all_ranks, check_values, device_of
from labkit.parallel.sharding.reduce_scatter_ddp import ReduceScatterDDP
from labkit.parallel.sharding.rows import check_no_overlap, gather_rows, gradient_rows, own_rows, shard_parameter
from labkit.parallel.sharding.state_dicts import consolidate, state_rows
from labkit.parallel.transport import AUTO
from labkit.parallel.transport.select_transport import find_transport, member_group

NO_SETTINGS = ("params", "param_names", "foreach")  # of a parameter group
SHARD = "shard"  # in a state_dict: which one it is
MAX_TOGETHER = 300  # parameters per operator: DTensor's first such call takes time in their square
REFUSED: Mapping[type[Optimizer], str] = {
    optim.LBFGS: "its search direction depends on all parameters together",
    optim.SparseAdam: "it is made for sparse gradients",
    optim.Adafactor: "torch's DTensor does not know its means over rows and columns",
}


class ShardedOptimizer(Optimizer):
    """`optimizer_cls(params, **settings)`, each rank with a share of the state: a `torch.optim.Optimizer`.

    Args:
        params: parameters, or groups of them, as for any optimizer; the same on all ranks, on one device, dense.
        optimizer_cls: the optimizer, which gets this rank's rows of each parameter.
        wrapper: a `ReduceScatterDDP`, whose group it takes.
        group: the process group; None: all ranks.
        transport: as for `labkit.parallel.collectives.all_gather`.
        settings: those of `optimizer_cls`.

    `param_groups` are of whole parameters and may be changed at any time, by schedulers, say. A parameter that is
    frozen from the start costs nothing. State dicts are torch's, with DTensors of this rank's rows.

    Raises ValueError, on all ranks of the group, for an optimizer that cannot be sharded, for parameters it cannot
    take, and for arguments that differ between ranks; on a rank that is not of the group; in `step` for sparse
    gradients.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_cls: Callable[..., Optimizer],
        *,
        wrapper: ReduceScatterDDP | None = None,
        group: dist.ProcessGroup | None = None,
        transport: str = AUTO,
        **settings: Any,
    ):
        group = group if wrapper is None else wrapper.group
        members = member_group(group)
        self._group, self._transport, self._place = group, transport, (members.rank(), members.size())
        self._inner: Optimizer | None = None
        self._shards: dict[Tensor, Any] = {}
        """This rank's rows of each parameter, views of its memory, as the inner optimizer has them."""
        self._gathered: set[Any] = set()
        """Parameters that have been trained at any time."""

        def prepare() -> None:
            super(ShardedOptimizer, self).__init__(params, {})
            for refused, reason in REFUSED.items():
                if isinstance(optimizer_cls, type) and issubclass(optimizer_cls, refused):
                    raise ValueError(f"{optimizer_cls.__name__} cannot be sharded: {reason}")
            self._check_parameters()
            self._mesh = DeviceMesh.from_group(members, self._device.type)
            self._inner = optimizer_cls([self._shard_group(each) for each in self.param_groups], **settings)
            self.defaults = self._inner.defaults
            self._adopt_settings()

        arguments = {"class": getattr(optimizer_cls, "__name__", ""), "transport": transport}
        self._on_all_ranks(prepare, arguments)
        self._which = f"rank {members.rank()} of {members.size()}"
        if members.size() > 1:
            find_transport(group, self._device, transport)  # ValueError now, not at the first step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more group of parameters. A collective; ValueError, on all ranks, as for those given at first."""
        if (inner := self._inner) is None:  # the base class collects what it is made with
            super().add_param_group(param_group)
            return
        number = len(self.param_groups)

        def add() -> None:
            super(ShardedOptimizer, self).add_param_group(param_group)
            self._check_parameters()
            inner.add_param_group(self._shard_group(self.param_groups[number]))

        try:
            self._on_all_ranks(add, {})
        except BaseException:  # whatever it was, the optimizer is as before
            del self.param_groups[number:], inner.param_groups[number:]
            self._shards = {p: self._shards[p] for p in self._parameters}
            raise
        self._adopt_settings()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters. A collective. A closure is called once, on every rank, and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._inner is not None
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in self._parameters):
            raise ValueError("expected dense gradients, got a sparse one")
        for p, shard in self._shards.items():
            shard._local_tensor = own_rows(p.detach(), *self._place)  # the parameter's data may have been replaced
            if p.grad is not None:
                local = p.grad._local_tensor if isinstance(p.grad, DTensor) else own_rows(p.grad.detach(), *self._place)
                shard.grad = gradient_rows(local, shard)
        self._hand_settings_over()
        try:
            self._inner.step()
        finally:
            for p, shard in self._shards.items():
                shard.grad, own = None, own_rows(p.detach(), *self._place)
                if shard._local_tensor.data_ptr() != own.data_ptr():  # it has replaced the shard's data
                    own.copy_(shard._local_tensor)
        self._adopt_settings()
        self.gather_parameters()
        return loss

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Every parameter as the ranks have its rows: what a step ends with. A collective.

        Not those that have been frozen from the start.
        """
        self._gathered |= {p for p in self._parameters if p.requires_grad}
        if self._place[1] > 1:
            trained = [p.detach() for p in self._parameters if p in self._gathered]
            gather_rows(trained, self._group, transport=self._transport)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_`: the norm before, a scalar. A collective if gradients are in rows."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def state_dict(self) -> dict[str, Any]:
        """torch's layout, with this rank's rows as DTensors: for as many ranks to go on from, each with its own."""
        assert self._inner is not None
        inner = self._inner.state
        self.state.update({p: dict(inner[shard]) for p, shard in self._shards.items() if shard in inner})
        return {**super().state_dict(), SHARD: self._which}

    def consolidated_state_dict(self, *, to: int | None = 0) -> dict[str, Any] | None:
        """torch's own layout, as `optimizer_cls` without shards would give it, on group rank `to` or on all (None).

        A collective; None on the other ranks. Tensors are on the CPU. It loads into a plain optimizer, and into a
        sharded one on any number of ranks; so does a plain optimizer's `state_dict`.
        """
        state = {name: value for name, value in self.state_dict().items() if name != SHARD}
        whole: dict[str, Any] | None = consolidate(state, to in (None, self._mesh.get_local_rank()))
        return whole

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A `state_dict()` of this rank, or a state in torch's own layout, of which this rank takes its rows.

        ValueError for the shard of another rank, or of another number of ranks, and for other parameter groups.
        """
        assert self._inner is not None
        if (which := state_dict.get(SHARD, self._which)) != self._which:
            raise ValueError(f"expected the shard of {self._which} or a whole state, got the shard of {which}")
        super().load_state_dict(state_dict)
        self._inner.state.clear()
        for p, shard in self._shards.items():
            if p in self.state:
                state = self.state[p].items()
                self._inner.state[shard] = {name: state_rows(value, shard) for name, value in state}
        self._hand_settings_over()

    def __getstate__(self) -> NoReturn:
        raise TypeError("a sharded optimizer is one with those of other processes: save its state_dict()")

    @property
    def _parameters(self) -> list[Any]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def _device(self) -> torch.device:
        return torch.device(self._parameters[0].device)

    def _check_parameters(self) -> None:
        """ValueError for parameters that an optimizer in shards cannot take."""
        parameters = self._parameters
        if not parameters or len({p.device for p in parameters}) != 1 or len(set(parameters)) != len(parameters):
            raise ValueError("expected one parameter or more, on one device, each once")
        for number, p in enumerate(parameters):
            check_values(f"parameter {number}", p)
            if isinstance(p, DTensor) or p.layout is not torch.strided or torch._debug_has_internal_overlap(p) == 1:
                raise ValueError("expected parameters that are whole and dense, each element with memory of its own")
        check_no_overlap(parameters)

    def _on_all_ranks(self, action: Callable[[], None], settings: dict[str, object]) -> None:
        """Do it on this rank, and see that all have done the same; whatever is wrong on one rank, all raise."""
        refused: Exception | None = None
        try:
            action()
        except TypeError as error:
            refused = ValueError(str(error))
            refused.__cause__ = error
        except Exception as error:
            refused = error
        groups = [] if refused else self.param_groups
        plain = (bool, int, float, str, tuple)
        described = [f"{tuple(p.shape)}, {p.dtype}, {p.requires_grad}" for group in groups for p in group["params"]]
        described += [f"{k}: {v}" for group in groups for k, v in _settings(group).items() if isinstance(v, plain)]
        device = self._device if described else device_of(self._group)
        check_same_on_all_ranks("optimizer", settings, described, device, self._group, refused)

    def _shard_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What the inner optimizer gets of a group."""
        self._shards |= {p: shard_parameter(p, self._mesh, copy=False) for p in group["params"]}
        return {**group, "params": [self._shards[p] for p in group["params"]]}

    def _hand_settings_over(self) -> None:
        assert self._inner is not None
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_settings(group))
            if "foreach" in inner:  # a call per operator of DTensors, not one per parameter
                needs_loop = any(isinstance(value, Tensor) for value in group.values())  # lr as a tensor
                is_chosen = group["foreach"] is not None or group.get("fused") or group.get("differentiable")
                is_short = len(group["params"]) <= MAX_TOGETHER
                inner["foreach"] = group["foreach"] if is_chosen else is_short and not needs_loop

    def _adopt_settings(self) -> None:
        assert self._inner is not None
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_settings(inner))
            group.setdefault("foreach", inner["foreach"]) if "foreach" in inner else None


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in NO_SETTINGS}
