"""How ranks agree in FSDP's passes: on descriptions, flags, and the collectives so far."""

from collections.abc import Callable
from itertools import zip_longest

import torch.distributed as dist

from labkit.parallel.agreement import agree_per_pass
from labkit.parallel.messages import gather_json
from labkit.parallel.overlap import Channel
from labkit.parallel.transport import AUTO
from labkit.parallel.transport.base import checksum


class PassAgreement:
    """Compares what ranks are about to do, and what they have communicated since the last time."""

    def __init__(
        self,
        channel: Channel,
        group: dist.ProcessGroup | None,
        collectives: list[str],
        n_flags: int,
    ) -> None:
        """`collectives`: the list to which units add theirs; `n_flags`: the most of any phase."""
        self._channel = channel
        self._group = group
        self._collectives = collectives
        self._n_flags = n_flags

    def agree(
        self, phase: str, describe: Callable[[], dict[str, object]], flags: list[bool]
    ) -> list[bool]:
        """Compare the ranks' descriptions; return which flags any rank has set. A collective.

        RuntimeError, on all ranks, if they have communicated other units since they last agreed.
        """
        collectives = self._collectives[:]
        self._collectives.clear()
        # As many numbers in every phase: ranks that are in different ones shall notice.
        unused = [0] * (self._n_flags - len(flags))
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
