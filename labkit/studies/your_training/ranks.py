"""Your training on several ranks: wrappers and stages of ZeRO, each checked, then timed in turns.

Each rank has batches of its own, as with torch's `DistributedSampler`. A strategy is right if its
parameters after two steps are those of one process that trains on the batches of all ranks.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from labkit.bench.check import OK, largest, max_over_ranks, refusal_columns
from labkit.nn.training import Workload
from labkit.parallel.agreement import agree_once
from labkit.parallel.data_parallel import IMPLEMENTATIONS as WRAPPERS
from labkit.parallel.data_parallel import LOCAL, OVER_SHARED_MEMORY, TORCH
from labkit.parallel.data_parallel import wrap as wrap_data_parallel
from labkit.parallel.sharding import whole_parameters
from labkit.parallel.transport import SHARED, transport_in_use
from labkit.studies.shared.alternatives import check_and_time
from labkit.studies.shared.checks import (
    STEPS,
    Reference,
    train_in_one_process,
)
from labkit.studies.shared.held import held_bytes
from labkit.studies.shared.sharding_strategies import shard
from labkit.studies.your_training.check import (
    ROUNDINGS,
    allow_rounding,
    first_batch,
    is_random,
    round_otherwise,
)
from labkit.studies.your_training.loop import Loop, taking_turns
from labkit.studies.your_training.setup import SetupError, Training, check_first_step

# `LOCAL` is the same step without communication: what the others take longer is exposed.
STRATEGIES = (
    *(LOCAL, TORCH, "bucketed", "bucketed_shared", "naive", "flat", "overlapped"),
    *("zero1", "zero2", "zero3", "torch_zero1", "torch_zero3"),
)
# Share of the largest gradient to which the check raises an optimizer's `eps`. Adam divides by a
# gradient's size: with an `eps` below its rounding, the sign of noise decides.
EPS_SHARE = 0.01
# Learning rate to which the check raises a smaller one, such as the first of a schedule.
MIN_LR = 1e-3


def measure_ranks(make: Callable[[], Training], seed: int, rounds: Any) -> Iterator[dict[str, Any]]:
    """Yield seconds of each part of a step by strategy, on this rank, and the bytes it holds.

    `make` builds equal trainings. SetupError on all ranks if one of them cannot train.
    """
    # torch's FSDP warns of each layer whose output is a view, on each rank.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    rank = Rank.of(make, seed)
    device = str(rank.make().device)
    # Hosts may round otherwise, and one that refuses would leave the others waiting.
    is_rounding = max_over_ranks(float(not any(rank.reference.scales.values()))) > 0
    rows: dict[str, dict[str, Any]] = {}
    for name in STRATEGIES:
        rows[name] = {"kind": "rank part", "strategy": name}
        if is_rounding and name != LOCAL:
            rows[name] |= refusal_columns("it cannot be checked: rounding alone decides parameters")
        elif name in OVER_SHARED_MEMORY and (device != "cpu" or transport_in_use()[0] != SHARED):
            rows[name] |= refusal_columns("ranks do not share memory here")
    loops: dict[str, Loop] = {}
    # A loader's workers end their batches together: one step alone would wait for all or for none.
    n_steps = max(1, rank.wrap(LOCAL).prefetched)

    def check(name: str) -> tuple[dict[str, Any], dict[str, Callable[[], Any]]]:
        loops[name] = rank.wrap(name)
        columns = rank.check(loops[name]) if name != LOCAL else dict(OK)
        parts = loops[name].parts.items()
        return columns, {f"{n} {part}": run for n in range(n_steps) for part, run in parts}

    # The check fills `loops`, before the first turn begins.
    with taking_turns(loops) as begin:
        options: dict[str, Any] = {"before": dist.barrier, "prepare": begin, **rounds}
        for row in check_and_time(rows, check, "part", device=device, **options):
            if "part" in row:
                # Shares of the mean step, which the parts of all steps add up to.
                row["part"] = row["part"].partition(" ")[2]
                row["seconds"] = [seconds / n_steps for seconds in row["seconds"]]
            yield row


@dataclass(frozen=True)
class OptimizerPlan:
    """A reader's optimizer as class and settings, to be built on a wrapped model."""

    kind: Any
    settings: dict[str, Any]
    groups: list[dict[str, Any]]
    """With names in the place of parameters: a wrapper may replace the model's."""
    eps: float

    @staticmethod
    def of(training: Training, eps: float) -> "OptimizerPlan":
        """Plan the optimizer of a training whose model is bare.

        SetupError for parameters that are not the model's.
        """
        names = {id(parameter): name for name, parameter in training.model.named_parameters()}
        groups, settings = _constructor_arguments(training.optimizer)
        for group in groups:
            if not all(id(parameter) in names for parameter in group["params"]):
                raise SetupError("expected an optimizer of the model's parameters alone on ranks")
            group["params"] = [names[id(parameter)] for parameter in group["params"]]
        return OptimizerPlan(type(training.optimizer), settings, groups, eps)

    def checked_groups(self, wrapped: nn.Module) -> list[dict[str, Any]]:
        """Return groups of a wrapped model's parameters, with settings that rounding leaves alone.

        An update must be large compared with the rounding of a parameter, and no sign of noise.
        """
        parameters = dict(getattr(wrapped, "module", wrapped).named_parameters())
        groups = []
        for planned in self.groups:
            group = planned | {"params": [parameters[name] for name in planned["params"]]}
            for name, least in (("eps", self.eps), ("lr", MIN_LR)):
                if name in group:
                    group[name] = max(group[name], least)
            groups.append(group)
        return groups

    def build(self, wrapped: nn.Module) -> Optimizer:
        """Return the optimizer on a wrapped model, with the settings of the check."""
        optimizer: Optimizer = self.kind(self.checked_groups(wrapped), **self.settings)
        return optimizer

    def reset(self, optimizer: Optimizer) -> None:
        """Give an optimizer the reader's settings again."""
        for group, planned in zip(optimizer.param_groups, self.groups, strict=True):
            group.update({name: planned[name] for name in ("eps", "lr") if name in planned})


def _constructor_arguments(optimizer: Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return groups and settings from which its class makes an optimizer like this one."""
    # Some defaults are set by the class itself, such as AdamW's decoupled weight decay.
    names = {*inspect.signature(type(optimizer)).parameters, "params"}
    groups = [
        {name: value for name, value in group.items() if name in names}
        for group in optimizer.param_groups
    ]
    settings = {name: value for name, value in optimizer.defaults.items() if name in names}
    return groups, settings


@dataclass
class Rank:
    """One rank's share of a training, and the training in one process that it is compared with."""

    make: Callable[[], Training]
    batch: Any
    """This rank's first batch."""
    weight: float
    """Factor of this rank's loss in the check: 1 on average, another one on each rank.

    Ranks may have equal batches. Then a mean that leaves one of them out would still be right.
    """
    plan: OptimizerPlan
    is_random: bool
    """Whether the model draws random numbers: it is then compared in evaluation mode."""
    has_unused: bool
    """Whether parameters get no gradient, which wrappers must know."""
    reference: Reference

    @staticmethod
    def of(make: Callable[[], Training], seed: int) -> "Rank":
        """Build the training on every rank, and train it in one process on all ranks' batches."""
        number = dist.get_rank()
        world_size = dist.get_world_size()
        unused: list[str] = []

        # On all ranks or on none: one that fails would leave the others in their first collective.
        def describe() -> dict[str, Any]:
            training = make()
            if dist.get_backend() == "nccl" and training.device.type != "cuda":
                raise SetupError(
                    f"expected the model on a GPU, as ranks are, got {training.device}"
                )
            unused.extend(check_first_step(training)[1])
            names = [name for name, _ in training.model.named_parameters()]
            return {"parameters": names, "optimizer": type(training.optimizer).__name__}

        try:
            agree_once("setup", describe)
        except ValueError as error:  # of this rank, or of another
            raise SetupError(str(error)) from error
        # Each rank makes the batches of all ranks: it also trains as the one process.
        batches = [
            first_batch(share_batches(make(), rank, world_size), seed) for rank in range(world_size)
        ]
        weights = [2 * (rank + 1) / (world_size + 1) for rank in range(world_size)]
        yours = Loop(make())
        _, gradients = yours.gradients(batches[0])
        eps = EPS_SHARE * max(largest(one) for one in gradients.values())
        plan = OptimizerPlan.of(yours.training, eps)
        has_random = is_random(yours, batches[0], seed)

        def train(seed: int | None = None) -> Reference:
            # A fresh one: the gradients above have moved running statistics.
            fresh = make()
            fresh.model.train(fresh.model.training and not has_random)
            if seed is not None:
                round_otherwise(fresh.model, seed)
            workloads = [
                Workload(lambda: fresh.model, partial(_loss, fresh, batch, weight))
                for batch, weight in zip(batches, weights, strict=True)
            ]
            return train_in_one_process(workloads, plan.build)

        # One at a time: each has a copy of the model.
        reference = allow_rounding(train(), (train(seed) for seed in range(ROUNDINGS)))
        return Rank(
            make=make,
            batch=batches[number],
            weight=weights[number],
            plan=plan,
            is_random=has_random,
            has_unused=bool(unused),
            reference=reference,
        )

    def wrap(self, name: str) -> Loop:
        """Return this rank's loop under a strategy, with the reader's optimizer and its groups."""
        training = share_batches(self.make(), dist.get_rank(), dist.get_world_size())
        bare = training.model
        if name == LOCAL:
            return Loop(training)
        plan = self.plan
        if name in WRAPPERS:
            wrapped = wrap_data_parallel(name, bare, find_unused=self.has_unused)
            optimizer = plan.build(wrapped)
        else:
            wrapped, optimizer = shard(
                name, bare, plan.kind, parameters=plan.checked_groups, **plan.settings
            )
        return Loop(replace(training, optimizer=optimizer), call=wrapped)

    def check(self, loop: Loop) -> dict[str, Any]:
        """Train as long as the reference; return error, status, and the bytes that are held."""
        model = loop.call
        mode = model.training
        model.train(mode and not self.is_random)
        for _ in range(STEPS):
            loop.training.optimizer.zero_grad()
            _loss(loop.training, self.batch, self.weight, model).backward()
            loop.training.optimizer.step()
        # Before the parameters are gathered, and while there are gradients.
        held = held_bytes(model, loop.training.optimizer)
        columns = self.reference.check(whole_parameters(model))
        loop.training.optimizer.zero_grad()
        self.plan.reset(loop.training.optimizer)
        model.train(mode)
        return columns | held


def _loss(training: Training, batch: Any, weight: float, model: nn.Module) -> Tensor:
    return weight * training.loss(model, batch)


@dataclass
class EveryOther:
    """A rank's batches of a sampler: every `world_size`-th, from its own number up."""

    batches: Iterable[Any]
    rank: int
    world_size: int

    def __iter__(self) -> Iterator[Any]:
        # The last ones are left out, so that all ranks have equally many.
        whole = len(self) * self.world_size
        return islice(iter(self.batches), self.rank, whole, self.world_size)

    def __len__(self) -> int:
        batches: Any = self.batches
        return max(1, len(batches) // self.world_size)


def share_batches(training: Training, rank: int, world_size: int) -> Training:
    """Give a rank its share of the batches: of a DataLoader's sampler, or of a list.

    Other iterables are left as they are, and so is a sampler of the reader's, which may already
    know the rank.
    """
    batches: Any = training.batches
    if isinstance(batches, list):
        # Rotated, not divided: a list may have fewer batches than there are ranks.
        first = rank % len(batches) if batches else 0
        return replace(training, batches=batches[first:] + batches[:first])
    is_shareable = isinstance(batches, DataLoader) and batches.batch_sampler is not None
    if is_shareable and isinstance(batches.sampler, RandomSampler | SequentialSampler):
        sampler = EveryOther(batches.batch_sampler, rank, world_size)
        loader: Any = DataLoader(
            batches.dataset,
            batch_sampler=sampler,
            collate_fn=batches.collate_fn,
            pin_memory=batches.pin_memory,
            timeout=batches.timeout,
            worker_init_fn=batches.worker_init_fn,
            generator=batches.generator,
            num_workers=batches.num_workers,
        )
        return replace(training, batches=loader)
    return training
