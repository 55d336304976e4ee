"""Bytes that a rank holds from step to step: of parameters, gradients and optimizer states."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from labkit.parallel.sharding import FSDP, is_distributed
from labkit.torch_private import tree_leaves

# Share of the memory that a training may take; the rest is for other programs.
FIT_SHARE = 0.9


def held_bytes(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Return the columns `parameters_bytes`, `gradients_bytes` and `optimizer_bytes` of this rank.

    Gradients count as long as they are not dropped.
    """
    # torch's sharded optimizer keeps its state in an optimizer of its shard.
    inner = [each for each in tree_leaves(vars(optimizer)) if isinstance(each, Optimizer)]
    states = [list(each.state.values()) for each in (optimizer, *inner)]
    parameters = [*model.parameters()]
    for module in model.modules():
        # ZeRO-2 keeps unsharded parameters from step to step, beside the shards.
        if isinstance(module, FSDP):
            parameters += module.unsharded_parameters
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {
        "parameters_bytes": storage_bytes(parameters),
        "gradients_bytes": storage_bytes(gradients),
        "optimizer_bytes": storage_bytes(tree_leaves(states)),
    }


def storage_bytes(leaves: Iterable[Any]) -> int:
    """Return the bytes of the tensors' storages on this rank, each counted once."""
    n_bytes: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            local = leaf.to_local() if is_distributed(leaf) else leaf
            storage = local.untyped_storage()
            # By storage: a bucket has many gradients, and counts once.
            n_bytes[storage._cdata] = storage.nbytes()
    return sum(n_bytes.values())
