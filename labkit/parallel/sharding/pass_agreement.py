"""How ranks agree in FSDP's passes: on descriptions, flags, and the collectives so far."""

from collections.abc import Callable, Sequence
from itertools import islice, zip_longest

import torch.distributed as dist
from torch import nn

from labkit.parallel.agreement import agree_per_pass
from labkit.parallel.messages import gather_json
from labkit.parallel.overlap import Channel
from labkit.parallel.sharding.sharded import Sharded
from labkit.parallel.sharding.unit import Unit
from labkit.parallel.transport import AUTO
from labkit.parallel.transport.base import checksum


class PassAgreement:
    """Compares what ranks are about to do, and what they have communicated since the last time."""

    def __init__(
        self,
        channel: Channel,
        group: dist.ProcessGroup | None,
        collectives: list[str],
        units: Sequence[Unit],
        ignored: Sequence[nn.Parameter],
    ) -> None:
        """`collectives`: the list to which units add theirs; the last of `units` is the model."""
        self._channel = channel
        self._group = group
        self._collectives = collectives
        self._units = units
        self._names = {
            parameter.sharded: parameter.name for unit in units for parameter in unit.parameters
        }
        self._ignored = set(ignored)

    def before_forward(self) -> list[bool]:
        """Begin a forward pass: return for each unit whether it is stale on any rank.

        A collective. ValueError, on all ranks, if one has replaced, moved or added parameters,
        trains others, or has gradients that no backward pass has averaged.
        """

        def describe() -> dict[str, object]:
            self._check_parameters()
            for unit in self._units:
                if unit.has_unreduced_gradients:
                    raise ValueError(
                        f"gradients of {unit.name} were not averaged: FSDP found no output of it;"
                        " return outputs in containers or objects"
                    )
            return self._describe_trained()

        return self._agree("model", describe, [unit.is_stale for unit in self._units])

    def after_evaluation(self) -> None:
        """End a forward pass in which no module in training made a graph. A collective."""
        self._agree("end of evaluation", dict, [])

    def after_backward(self) -> tuple[list[Unit], list[list[bool]]]:
        """End a backward pass: return what any rank has. A collective.

        First the units with gradients that are still to be reduced. Then, for each unit, which of
        its parameters got a gradient. ValueError, on all ranks, for sparse gradients.
        """

        def describe() -> dict[str, object]:
            for unit in self._units:
                for name in unit.sparse_gradients:
                    raise ValueError(f"expected dense gradients, got a sparse one of {name}")
            return self._describe_trained()

        is_unreduced = [unit.has_unreduced_gradients for unit in self._units]
        has_gradient = [
            parameter.has_gradient or parameter.unsharded.grad is not None
            for unit in self._units
            for parameter in unit.parameters
        ]
        on_any_rank = iter(self._agree("gradients", describe, [*is_unreduced, *has_gradient]))
        unreduced = [unit for unit in self._units if next(on_any_rank)]
        used = [list(islice(on_any_rank, len(unit.parameters))) for unit in self._units]
        return unreduced, used

    def _describe_trained(self) -> dict[str, object]:
        names = [name for parameter, name in self._names.items() if parameter.requires_grad]
        return {"trained parameters": names}

    def _check_parameters(self) -> None:
        """Raise ValueError unless the model has the parameters with which it was wrapped."""
        model = self._units[-1].module
        present = {
            parameter
            for module in model.modules()
            for parameter in module._parameters.values()
            if parameter is not None
        }
        moved = {
            parameter.sharded
            for unit in self._units
            for parameter in unit.parameters
            for module, name in parameter.owners
            if module._parameters.get(name) is not parameter.sharded
        }
        for parameter, name in self._names.items():
            # Pruning and parametrizations keep a parameter, under another name.
            if parameter not in present or parameter in moved:
                raise ValueError(f"{name} was replaced or removed: change the model, then wrap it")
            if type(parameter) is not Sharded:  # torch has swapped it for a result of to()
                raise ValueError(f"{name} was moved or cast: move and cast the model, then wrap it")
        if len(present) > len(self._names):
            for name, parameter in model.named_parameters():
                if parameter not in self._names and parameter not in self._ignored:
                    raise ValueError(
                        f"{name} was added to the model: change the model, then wrap it"
                    )

    def _agree(
        self, phase: str, describe: Callable[[], dict[str, object]], flags: list[bool]
    ) -> list[bool]:
        """Compare the ranks' descriptions; return which flags any rank has set. A collective.

        RuntimeError, on all ranks, if they have communicated other units since they last agreed.
        """
        collectives = self._collectives[:]
        self._collectives.clear()
        # As many numbers in every phase: ranks that are in different ones shall notice.
        most_flags = sum(1 + len(unit.parameters) for unit in self._units)
        unused = [0] * (most_flags - len(flags))
        numbers = [checksum(*collectives), *flags, *unused]
        by_rank: list[list[int]] = []
        channel = self._channel
        is_on_cpu = channel.transport.device.type == "cpu"

        def agree() -> None:
            by_rank.extend(
                agree_per_pass(
                    phase,
                    lambda: {"phase": phase, **describe()},
                    self._group,
                    numbers=numbers,
                    transport=channel.transport if is_on_cpu else AUTO,
                )
            )

        if is_on_cpu:
            # In order with the other collectives: a rank that is at another one raises. Elsewhere
            # it would wait for this one, and this rank for the other.
            channel.start(agree)()
        else:
            agree()  # between CPUs: in the channel's stream it would wait for a GPU
        checksums, *flags_by_rank = zip(*by_rank, strict=True)
        if len(set(checksums)) > 1:
            raise RuntimeError(_describe_difference(gather_json(collectives, self._group)))
        return [any(flags_of_ranks) for flags_of_ranks in flags_by_rank[: len(flags)]]


def _describe_difference(by_rank: list[list[str]]) -> str:
    """Return the first collective in which the ranks differ."""
    for names in zip_longest(*by_rank, fillvalue="nothing"):
        for rank, name in enumerate(names):
            if name != names[0]:
                return (
                    "all ranks must run the same units in the same order: rank 0 has made the"
                    f" {names[0]} where rank {rank} has made the {name}"
                )
    raise AssertionError("checksums differ, and collectives do not")
