"""What autograd saves in a forward pass, by operator."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SavedStorage:
    """One piece of memory that the backward pass will read."""

    n_bytes: int
    operators: tuple[str, ...]
    """Whose backward reads it, nearest to the output first: ("bmm", "softmax")."""
    is_input: bool
    """It was there before the forward pass: the input itself."""


def saved_by_operator(
    function: Callable[[], Tensor], *, own: Iterable[Tensor] = (), inputs: Iterable[Tensor] = ()
) -> tuple[Tensor, list[SavedStorage]]:
    """Call `function` and list the storages that its operators saved; storages of `own` (parameters) are left out.

    Every saved tensor passes the hooks and gets a number; reading the `_saved_...` attributes of the graph's nodes
    afterwards tells which node has which. What an autograd.Function keeps has no such attribute: its operator is "".
    """
    saved: list[Tensor] = []
    read: list[int] = []

    def pack(tensor: Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    def unpack(number: int) -> Tensor:
        read.append(number)
        return saved[number]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = function()
    known = {_key(tensor) for tensor in own}
    given = {_key(tensor) for tensor in inputs}
    sizes = {_key(tensor): tensor.untyped_storage().nbytes() for tensor in saved if _key(tensor) not in known}
    names: dict[int, list[str]] = {key: [] for key in sizes}
    for node in _nodes(output.grad_fn):
        read.clear()
        for attribute in dir(node):
            if attribute.startswith("_saved_"):
                getattr(node, attribute)
        for key in {_key(saved[number]) for number in read} & set(sizes):
            names[key].append(_operator(node))
    listed = [SavedStorage(n, tuple(names[key]), key in given) for key, n in sizes.items()]
    return output, listed


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _nodes(root: Any) -> list[Any]:
    """The nodes of a graph, each once, breadth first from the output."""
    found, waiting = dict[Any, None](), [root]
    while waiting:
        node = waiting.pop(0)
        if node is not None and node not in found:
            found[node] = None
            waiting += [following for following, _ in node.next_functions]
    return list(found)


def _operator(node: Any) -> str:
    """ "MaskedFillBackward0" -> "masked_fill", as the operator is called."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(node.name()).rpartition("::")[2].partition("Backward")[0]).lower()
