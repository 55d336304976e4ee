"""Your training on several ranks: wrappers and stages of ZeRO, each checked, then timed in turns.

Each rank has batches of its own, as with torch's `DistributedSampler`. A strategy is right if its
parameters after two steps are those of one process that trains on the batches of all ranks.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sized
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from labkit.bench.check import OK, largest, max_over_ranks, refusal_columns
from labkit.lab.point import TimedPoint
from labkit.nn.training import Workload
from labkit.parallel.agreement import agree_once
from labkit.parallel.data_parallel import IMPLEMENTATIONS as WRAPPERS
from labkit.parallel.data_parallel import LOCAL, OVER_SHARED_MEMORY, TORCH
from labkit.parallel.data_parallel import wrap as wrap_data_parallel
from labkit.parallel.sharding import whole_parameters
from labkit.studies.shared.alternatives import check_and_time, shared_memory_refusal
from labkit.studies.shared.checks import STEPS, Reference, train_in_one_process
from labkit.studies.shared.held import held_bytes
from labkit.studies.shared.sharding_strategies import shard
from labkit.studies.your_training.check import (
    ROUNDINGS,
    allow_rounding,
    first_batch,
    is_random,
    round_otherwise,
)
from labkit.studies.your_training.loop import PARTS, Loop, taking_turns
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


def measure_ranks(point: TimedPoint, make: Callable[[], Training]) -> Iterator[dict[str, Any]]:
    """Yield seconds of each part of a step by strategy, on this rank, and the bytes it holds.

    `make` builds equal trainings. SetupError on all ranks if one of them cannot train.
    """
    # torch's FSDP warns of each layer whose output is a view, on each rank.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    rank = Rank(make, point.seed)
    loops = {LOCAL: rank.wrap(LOCAL)}
    device = str(loops[LOCAL].training.device)
    # A loader's workers end their batches together: one step alone would wait for all or for none.
    n_steps = max(1, loops[LOCAL].prefetched)
    # Hosts may round otherwise, and one that refuses would leave the others waiting.
    is_rounding = max_over_ranks(float(not any(rank.reference.scales.values()))) > 0
    rows: dict[str, dict[str, Any]] = {}
    for name in STRATEGIES:
        rows[name] = {"kind": "rank part", "strategy": name}
        if is_rounding and name != LOCAL:
            rows[name] |= refusal_columns("it cannot be checked: rounding alone decides parameters")
        elif name in OVER_SHARED_MEMORY:
            rows[name] |= shared_memory_refusal(device)

    # Several steps make a turn, and each part of each step is timed.
    part_of = {f"{n} {part}": part for n in range(n_steps) for part in PARTS}

    def check(name: str) -> tuple[dict[str, Any], dict[str, Callable[[], Any]]]:
        columns: dict[str, Any] = dict(OK)
        if name != LOCAL:
            loops[name] = rank.wrap(name)
            columns = rank.check(loops[name])
        parts = loops[name].parts
        return columns, {label: parts[part] for label, part in part_of.items()}

    # The check fills `loops`, before the first turn begins.
    with taking_turns(loops) as begin:
        options: dict[str, Any] = {"before": dist.barrier, "prepare": begin, **point.rounds}
        for row in check_and_time(rows, check, "part", device=device, **options):
            if "part" in row:
                # Shares of the mean step, which the parts of all steps add up to.
                row["part"] = part_of[row["part"]]
                row["seconds"] = [seconds / n_steps for seconds in row["seconds"]]
            yield row


class OptimizerPlan:
    """A reader's optimizer as class and settings, to be built on a wrapped model.

    SetupError for one with parameters that are not the model's.
    """

    def __init__(self, training: Training, eps: float) -> None:
        optimizer = training.optimizer
        self.kind: Any = type(optimizer)
        self.eps = eps
        # Some defaults are set by the class itself, such as AdamW's decoupled weight decay.
        known = {*inspect.signature(self.kind).parameters, "params"}
        self.settings = {name: one for name, one in optimizer.defaults.items() if name in known}
        # With names in the place of parameters: a wrapper may replace the model's.
        self.groups: list[dict[str, Any]] = []
        names = {parameter: name for name, parameter in training.model.named_parameters()}
        for group in optimizer.param_groups:
            if not names.keys() >= {*group["params"]}:
                raise SetupError("expected an optimizer of the model's parameters alone on ranks")
            planned = {name: one for name, one in group.items() if name in known}
            self.groups.append(planned | {"params": [names[one] for one in group["params"]]})

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


class Rank:
    """One rank's share of a training, and the training in one process that it is compared with."""

    def __init__(self, make: Callable[[], Training], seed: int) -> None:
        """Build the training on every rank, and train it in one process on all ranks' batches."""
        self.make = make
        number = dist.get_rank()
        world_size = dist.get_world_size()
        # Wrappers must know whether parameters get no gradient.
        self.has_unused = _agree_on_setup(make)
        # Each rank makes the batches of all ranks: it also trains as the one process.
        batches = [
            first_batch(share_batches(make(), rank, world_size), seed) for rank in range(world_size)
        ]
        # Factors of the ranks' losses, 1 on average. Ranks may have equal batches: then a mean that
        # leaves one of them out would still be right.
        weights = [2 * (rank + 1) / (world_size + 1) for rank in range(world_size)]
        self.batch = batches[number]
        self.weight = weights[number]
        yours = Loop(make())
        _, gradients = yours.gradients(batches[0])
        eps = EPS_SHARE * max(largest(one) for one in gradients.values())
        self.plan = OptimizerPlan(yours.training, eps)
        # Then it is compared in evaluation mode.
        self.is_random = is_random(yours, batches[0], seed)

        def train(seed: int | None = None) -> Reference:
            # A fresh one: the gradients above have moved running statistics.
            fresh = make()
            fresh.model.train(fresh.model.training and not self.is_random)
            if seed is not None:
                round_otherwise(fresh.model, seed)
            workloads = [
                Workload(lambda: fresh.model, partial(_loss, fresh, batch, weight))
                for batch, weight in zip(batches, weights, strict=True)
            ]
            return train_in_one_process(workloads, self.plan.build)

        # One at a time: each has a copy of the model.
        self.reference = allow_rounding(train(), (train(seed) for seed in range(ROUNDINGS)))

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


def _agree_on_setup(make: Callable[[], Training]) -> bool:
    """Return whether a training has parameters without a gradient. SetupError on all ranks or none.

    One that fails would leave the others in their first collective.
    """
    unused: list[str] = []

    def describe() -> dict[str, Any]:
        training = make()
        if dist.get_backend() == "nccl" and training.device.type != "cuda":
            raise SetupError(f"expected the model on a GPU, as ranks are, got {training.device}")
        unused.extend(check_first_step(training)[1])
        names = [name for name, _ in training.model.named_parameters()]
        return {"parameters": names, "optimizer": type(training.optimizer).__name__}

    try:
        agree_once("setup", describe)
    except ValueError as error:  # of this rank, or of another
        raise SetupError(str(error)) from error
    return bool(unused)


def _loss(training: Training, batch: Any, weight: float, model: nn.Module) -> Tensor:
    return weight * training.loss(model, batch)


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
    # A batch sampler of the reader's may have no end.
    is_finite = isinstance(batches, DataLoader) and isinstance(batches.batch_sampler, Sized)
    if is_finite and isinstance(batches.sampler, RandomSampler | SequentialSampler):
        drawn = [*batches.batch_sampler]
        # The last ones are left out, so that all ranks have equally many.
        whole = len(drawn) - len(drawn) % world_size
        loader: Any = DataLoader(
            batches.dataset,
            batch_sampler=drawn[rank:whole:world_size] or drawn[:1],
            collate_fn=batches.collate_fn,
            pin_memory=batches.pin_memory,
            timeout=batches.timeout,
            worker_init_fn=batches.worker_init_fn,
            generator=batches.generator,
            num_workers=batches.num_workers,
        )
        return replace(training, batches=loader)
    return training
