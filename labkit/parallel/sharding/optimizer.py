"""ZeRO-1: an optimizer whose state and whose work are shared out over data-parallel ranks.

    model = BucketedDDP(model)                          gradients become the mean over ranks
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    ...
    optimizer.step()                                    each rank updates its share, then all get all of it

Every rank has all parameters and all gradients, which must be the same everywhere when `step` is called. Of the
optimizer's state, two values a parameter for AdamW, it has 1/p. A step moves (p-1)/p of the parameters' bytes per rank
beyond what averaging gradients does, and spares (p-1)/p of the update.

Source: Rajbhandari, Rasley, Ruwase & He 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054, section 5.1 (P_os) and, for what is sent, 7.2. The paper reduce-scatters gradients for it; here they
have been averaged by a wrapper, or by whoever. A `ReduceScatterDDP` does as the paper, and makes ZeRO-2 of it.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from labkit.parallel.data_parallel.consistency import check_same_on_all_ranks, device_of
from labkit.parallel.sharding.checkpoint import State, gather_states, part_of_state
from labkit.parallel.sharding.checks import check, check_parameters, describe_group, describe_parameter
from labkit.parallel.sharding.gathering import Gathering
from labkit.parallel.sharding.norms import clip_by_global_norm
from labkit.parallel.sharding.reduce_scatter_ddp import ReduceScatterDDP
from labkit.parallel.sharding.share import Share
from labkit.parallel.sharding.splitting import is_elementwise, refuse_coupled
from labkit.parallel.transport import AUTO
from labkit.parallel.transport.select_transport import find_transport, member_group

MIB = 2**20
OF_PARAMETERS = ("params", "param_names")  # of a parameter group; all else is a setting
SHARD = "shard"  # in a state_dict: which one it is


class ShardedOptimizer(Optimizer):
    """`optimizer_cls(params, **settings)`, each rank with a share of the state: a `torch.optim.Optimizer`.

    Args:
        params: parameters, or groups of them, as for any optimizer; the same on all ranks, on one device, dense.
        optimizer_cls: any optimizer that does not need all parameters at once. Where it updates every element by itself
            (AdamW, SGD, ...), state is shared out evenly to the element; where it needs whole parameters (Adafactor,
            Muon, ...), by parameters, as evenly as these allow.
        wrapper: a `ReduceScatterDDP`, which hands each rank the gradients of its share only (ZeRO-2), in
            `backward()`; until `zero_grad()`, the optimizer has them. All its trained parameters are given at first.
        group: the process group; None: all ranks, or the wrapper's.
        elementwise: whether it does update every element by itself. None: known for torch's, tried out for others.
        bucket_mb: updated parameters travel in buckets of about so many MiB; one bucket's memory is kept. Small ones
            stay in the cache while they are packed, gathered and copied out: a step is 3 % shorter than with 25.
        transport: as for `labkit.parallel.collectives.all_gather`.
        settings: those of `optimizer_cls`.

    `param_groups` are of whole parameters and may be changed at any time, by schedulers, say. `state` is that of
    this rank's share. A parameter that is frozen now costs nothing until it no longer is. With bfloat16 and float16
    parameters a result may differ from the unsharded one in the last bit, since torch rounds differently at the end of
    a vector; in float64 and float32 it is the same.

    Raises ValueError, on all ranks of the group, for an optimizer that cannot be sharded, for parameters it cannot
    take, and for arguments that differ between ranks; on a rank that is not of the group; in `step` for sparse
    gradients.
    """

    _share: Share

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_cls: Callable[..., Optimizer],
        *,
        wrapper: ReduceScatterDDP | None = None,
        group: dist.ProcessGroup | None = None,
        elementwise: bool | None = None,
        bucket_mb: float = 4.0,
        transport: str = AUTO,
        **settings: Any,
    ):
        group = group if wrapper is None else wrapper.group
        members = member_group(group)
        self._group, self._transport, self._bucket_mb, self._wrapper = group, transport, bucket_mb, wrapper
        self._inner: Optimizer | None = None
        self._gathering: Gathering | None = None
        self._awake: list[bool] = []

        def prepare() -> None:
            super(ShardedOptimizer, self).__init__(params, {})
            check(bucket_mb > 0, f"expected a bucket size above 0 MB, got {bucket_mb}")
            check_parameters(self._parameters)
            refuse_coupled(optimizer_cls)
            is_cut = is_elementwise(optimizer_cls, settings, self._device) if elementwise is None else elementwise
            self._share = Share(members.rank(), members.size(), is_cut, wrapper)
            self._inner = optimizer_cls([self._share_of_group(group) for group in self.param_groups], **settings)
            self.defaults, self.state = self._inner.defaults, self._inner.state
            _copy_settings(self._inner.param_groups, self.param_groups)

        arguments = {"class": getattr(optimizer_cls, "__name__", ""), "bucket_mb": bucket_mb, "transport": transport}
        arguments["wrapped"] = wrapper is not None
        self._on_all_ranks(prepare, arguments)
        if members.size() > 1:
            find_transport(group, self._device, transport)  # ValueError now, not at the first step
        if wrapper is not None:
            self._share.connect(self._parameters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more group of parameters. A collective; ValueError, on all ranks, as for those given at first."""
        if self._inner is None:  # the base class collects what it is made with
            super().add_param_group(param_group)
            return
        if self._wrapper is not None:
            raise ValueError("expected all parameters at first: the wrapper has shared their gradients out")
        number, share, inner = len(self.param_groups), self._share, self._inner

        def add() -> None:
            super(ShardedOptimizer, self).add_param_group(param_group)
            check_parameters(self._parameters)
            self._share = share.copy()
            inner.add_param_group(self._share_of_group(self.param_groups[number]))

        try:
            self._on_all_ranks(add, {})
        except BaseException:  # whatever it was, the optimizer is as before
            del self.param_groups[number:], inner.param_groups[number:]
            self._share = share
            raise
        _copy_settings(inner.param_groups, self.param_groups)
        self._gathering = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters. A collective. A closure is called once, on every rank, and its loss returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._inner is not None
        parameters = self._parameters
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in parameters):
            raise ValueError("expected dense gradients, got a sparse one")
        self._share.take_gradients(parameters, self._inner)
        _copy_settings(self.param_groups, self._inner.param_groups)
        try:
            self._inner.step()
        finally:
            self._share.release_gradients(parameters)
        _copy_settings(self._inner.param_groups, self.param_groups)
        self.gather_parameters()
        return loss

    def gather_parameters(self) -> None:
        """Every parameter as the rank has it that updates it: what a step ends with. A collective.

        Not those that have been frozen from the start.
        """
        if self._share.world_size == 1:
            return
        parameters = self._parameters
        known = [*self._awake, *[False] * (len(parameters) - len(self._awake))]
        awake = [parameter.requires_grad or before for parameter, before in zip(parameters, known, strict=True)]
        if self._gathering is None or awake != self._awake:
            self._awake = awake
            pieces = [[piece for piece in of_rank if awake[piece.parameter]] for of_rank in self._share.pieces]
            self._gathering = Gathering(parameters, pieces, int(self._bucket_mb * MIB), self._group, self._transport)
        self._gathering.run()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the parameters, and what a wrapper has handed out."""
        super().zero_grad(set_to_none)
        if self._wrapper is not None:
            self._share.zero_grad()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` of all gradients, wherever they are: the norm before, float64, a scalar.

        A collective.
        """
        own = [t.grad for t in self._share.tensors.values() if t.grad is not None] if self._wrapper else []
        common = [p.grad for p in self._parameters if p.grad is not None] if not self._wrapper else []
        return clip_by_global_norm(own, common, max_norm, norm_type, self._group, self._device)

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard: for a checkpoint that as many ranks go on from, each with its own."""
        assert self._inner is not None
        pieces = [list(piece) for piece in self._share.own]
        shard = {"rank": self._share.rank, "world_size": self._share.world_size, "pieces": pieces}
        return {"state": self._share.states(self._inner), "param_groups": self._numbered_groups(), SHARD: shard}

    def consolidated_state_dict(self, *, to: int | None = 0) -> dict[str, Any] | None:
        """torch's own layout, as `optimizer_cls` without shards would give it, on group rank `to` or on all (None).

        A collective; None on the other ranks. Tensors are on the CPU. It loads into a plain optimizer, and into a
        sharded one on any number of ranks; so does a plain optimizer's `state_dict`.
        """
        assert self._inner is not None
        own = self._share.states(self._inner)
        found = gather_states(own, self._parameters, self._share.pieces, self._group, to, device=self._device)
        return None if found is None else {"state": found, "param_groups": self._numbered_groups()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """This rank's own shard, or a state in torch's own layout, of which this rank takes its share.

        ValueError for the shard of another rank, or of another number of ranks, and for other parameter groups.
        """
        saved, share, parameters = state_dict["param_groups"], self._share, self._parameters
        lengths = [[len(group["params"]) for group in groups] for groups in (saved, self.param_groups)]
        check(lengths[0] == lengths[1], f"expected groups of {lengths[1]} parameters, got {lengths[0]}")
        names = [name for group in saved for name in group["params"]]
        states: Mapping[Any, State] = state_dict["state"]
        shard = state_dict.get(SHARD)
        if shard is None:
            states = {
                piece.parameter: part_of_state(states[name], parameters[piece.parameter], piece)
                for piece in share.own
                if (name := names[piece.parameter]) in states
            }
        elif shard["pieces"] != [list(piece) for piece in share.own]:
            raise ValueError(
                f"expected the shard of rank {share.rank} of {share.world_size}, or what consolidated_state_dict() "
                f"returns; got the shard of rank {shard['rank']} of {shard['world_size']}"
            )
        self._load(states, saved)

    def __getstate__(self) -> NoReturn:
        raise TypeError("a sharded optimizer is one with those of other processes: save its state_dict()")

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

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
        described = [describe_parameter(parameter) for group in groups for parameter in group["params"]]
        settings["groups"] = [describe_group(group) for group in groups]
        device = self._device if described else device_of(self._group)
        check_same_on_all_ranks("optimizer", settings, described, device, self._group, refused)

    def _share_of_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Share out the parameters of a group; what the inner optimizer gets of it."""
        before = itertools.takewhile(lambda each: each is not group, self.param_groups)
        first = sum(len(each["params"]) for each in before)
        return {"params": self._share.add(group["params"], first), **_settings_of(group)}

    def _load(self, states: Mapping[int, State], saved: list[dict[str, Any]]) -> None:
        """These states of this rank's pieces, by number of the parameter; settings from the saved groups."""
        assert self._inner is not None
        tensors = [tensor for group in self._inner.param_groups for tensor in group["params"]]
        place = {id(tensor): number for number, tensor in enumerate(tensors)}
        owned = self._share.tensors.items()
        by_place = {place[id(tensor)]: states[p.parameter] for p, tensor in owned if p.parameter in states}
        groups = [
            {**_settings_of(group), "params": [place[id(tensor)] for tensor in inner["params"]]}
            for group, inner in zip(saved, self._inner.param_groups, strict=True)
        ]
        self._inner.load_state_dict({"state": by_place, "param_groups": groups})
        self.state = self._inner.state
        for group, loaded in zip(self.param_groups, saved, strict=True):
            kept = {name: group[name] for name in OF_PARAMETERS if name in group}
            group.clear()
            group.update(_settings_of(loaded) | kept)

    def _numbered_groups(self) -> list[dict[str, Any]]:
        """The groups, with numbers in place of parameters, as torch saves them."""
        numbers = iter(range(len(self._parameters)))
        return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in self.param_groups]


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in OF_PARAMETERS}


def _copy_settings(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for of_source, of_target in zip(source, target, strict=True):
        of_target.update(_settings_of(of_source))
