"""Plans of tensor parallelism: which rule each layer, parameter, buffer and number of a model has.

A plan maps patterns to rules (`labkit.parallel.tensor` lists them). Reading it needs no ranks, so
that all of them refuse a plan before the first collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import filter as matching
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from labkit.parallel.layouts import find_cut
from labkit.parallel.tensor_collectives import Ranks, part_lengths
from labkit.parallel.tensor_layers import (
    ColumnsLinear,
    CutLayer,
    ParallelLayer,
    RowsLinear,
    SummedLayer,
    VocabularyEmbedding,
    VocabularyLinear,
    cut_class,
)

TRANSFORMER_PLAN: Mapping[str, str] = {
    "embedding": "vocabulary",
    "layers.*.attention_norm": "tokens",
    "layers.*.attention": "block",
    "layers.*.attention.n_heads": "count",
    "layers.*.attention.queries": "rows",
    "layers.*.attention.keys": "rows",
    "layers.*.attention.values": "rows",
    "layers.*.attention.output": "columns",
    "layers.*.feed_forward_norm": "tokens",
    "layers.*.feed_forward": "block",
    "layers.*.feed_forward.gate": "rows",
    "layers.*.feed_forward.up": "rows",
    "layers.*.feed_forward.down": "columns",
    "norm": "tokens",
    "output": "vocabulary",
}
"""Of `labkit.nn.transformer.Transformer`. Add your rules at the end: the last match counts."""

CUT_LAYERS: Mapping[tuple[str, type[nn.Module]], type[CutLayer]] = {
    ("rows", nn.Linear): RowsLinear,
    ("columns", nn.Linear): ColumnsLinear,
    ("vocabulary", nn.Embedding): VocabularyEmbedding,
    ("vocabulary", nn.Linear): VocabularyLinear,
}
CUTS = ("rows", "columns", "vocabulary")
REPLICATED = ("heads", "tokens", "whole")
RULES = (*CUTS, *REPLICATED, "block", "count")


class TensorRule(NamedTuple):
    """What a parameter or buffer is."""

    dim: int | None = None
    """The dimension in which it is cut; None: whole on every rank."""
    is_summed: bool = False
    """Each rank applies it to other activations, so its gradient is summed over ranks."""


@dataclass
class Rules:
    """A plan that fits a model: rules by names of layers, tensors and integer attributes."""

    layers: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, TensorRule] = field(default_factory=dict)
    counts: list[str] = field(default_factory=list)

    def is_in_block(self, name: str) -> bool:
        """Return whether a layer is in a block."""
        return "block" in map(self.layers.get, _ancestors(name))


def read_plan(model: nn.Module, plan: Mapping[str, str], p: int, sequence_parallel: bool) -> Rules:
    """Return the rules of a model on p ranks. ValueError, before any change, if they cannot be."""
    layers = dict(model.named_modules())
    is_cut = any(find_cut(parameter) for parameter in model.parameters())  # tied to a cut one
    if is_cut or any(isinstance(layer, ParallelLayer) for layer in layers.values()):
        raise ValueError("expected a model that is not cut")
    tensors = dict(named_tensors(model))
    by_name, rules = _match(plan, layers, tensors)
    unnamed = []
    for name, tensor in tensors.items():
        rule = _find_tensor_rule(name, by_name, sequence_parallel)
        if rule is not None:
            rules.tensors[name] = rule
        # A guess would train on gradients that are parts of a sum. A buffer is not trained.
        elif isinstance(tensor, nn.Parameter):
            unnamed.append(name)
    if unnamed:
        names = ", ".join(unnamed[:3])
        raise ValueError(
            f"expected a plan with a rule for every parameter; {len(unnamed)} have none: {names}"
        )
    _check_layers(rules, layers)
    _check_lengths(rules, layers, tensors, p)
    if sequence_parallel:
        _check_sequence_parallel(rules, layers)
    return rules


def apply_rules(model: nn.Module, rules: Rules, ranks: Ranks) -> None:
    """Give layers that are cut their classes, and blocks and dropout their hooks, in place."""
    layers: dict[str, Any] = dict(model.named_modules())
    for name in rules.counts:
        parent, _, attribute = name.rpartition(".")
        count = getattr(layers[parent], attribute)
        # The layer reshapes by it, as by a number of heads, and has 1/p of them.
        setattr(layers[parent], attribute, count // ranks.group.size())
    for name, layer in layers.items():
        rule = rules.layers.get(name, "")
        kind: Any = find_cut_layer(layer, rule)
        summed = [
            attribute
            for attribute, _ in layer.named_parameters(recurse=False)
            if rules.tensors[f"{name}.{attribute}".lstrip(".")].is_summed
        ]
        if kind is None and summed:
            # a norm of heads, or with sequence parallelism of tokens; any class is fine
            kind = SummedLayer
            layer.summed = summed
        if kind is not None:
            layer.__class__ = cut_class(kind, type(layer))
            layer.ranks = ranks
            layer.enters = not rules.is_in_block(name)  # else the block has entered
        draws = rule == "heads" or (rule == "tokens" and ranks.sequence_parallel)
        if rule == "block":
            layer.register_forward_pre_hook(partial(_enter_block, ranks), with_kwargs=True)
        elif draws and not any(True for _ in layer.parameters()):  # may be dropout
            layer.register_forward_pre_hook(partial(_begin_local, ranks))
        elif rule in ("tokens", "whole") and rules.is_in_block(name):
            layer.register_forward_pre_hook(partial(_check_place, ranks, name))
            continue
        else:
            continue
        # Also after an error: a block that stays open would draw other numbers in the next pass.
        layer.register_forward_hook(partial(_end_local, ranks), always_call=True)


def _enter_block(
    ranks: Ranks, block: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Bring a block's first input into it; it leaves at the block's columns."""
    first, *others = [*inputs, *options.values()]
    for other in others:
        # its gradient would be this rank's part only
        if isinstance(other, Tensor) and other.requires_grad:
            raise ValueError("expected a block of which only the first input requires a gradient")
    entered = ranks.enter(first)
    ranks.begin_local(block)
    if inputs:
        return (entered, *inputs[1:]), options
    return inputs, {**options, next(iter(options)): entered}


def _begin_local(ranks: Ranks, layer: nn.Module, _: Any) -> None:
    ranks.begin_local(layer)


def _end_local(ranks: Ranks, *_: Any) -> None:
    ranks.end_local()


def _check_place(ranks: Ranks, name: str, *_: Any) -> None:
    if ranks.is_local:
        raise ValueError(
            f"expected the rule 'heads' for {name}, which is used before the columns of its block"
        )


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def find_cut_layer(layer: nn.Module, rule: str) -> type[CutLayer] | None:
    """Return the class of a layer that a rule cuts; None if its forward pass is its own."""
    # a class with a forward pass of its own may use its matrix in any way
    for (name, base), cut_layer in CUT_LAYERS.items():
        if name == rule and isinstance(layer, base) and type(layer).forward is base.forward:
            return cut_layer
    return None


def _match(
    plan: Mapping[str, str], layers: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, str], Rules]:
    """Return the rules of layers and tensors by name, and `Rules` without the tensors."""
    integers = [
        f"{name}.{attribute}".lstrip(".")
        for name, layer in layers.items()
        for attribute, value in vars(layer).items()
        if type(value) is int  # not a bool
    ]
    names = [*filter(None, layers), *tensors]
    by_name: dict[str, str] = {}
    rules = Rules()
    for pattern, rule in plan.items():
        if rule not in RULES:
            raise ValueError(f"expected a rule among {', '.join(RULES)}, got {rule!r}")
        matches = matching(integers if rule == "count" else names, pattern)
        if not matches:
            raise ValueError(f"expected patterns that match the model; {pattern!r} does not")
        if rule == "count":
            rules.counts += matches
        else:
            by_name |= dict.fromkeys(matches, rule)
    rules.layers = {name: rule for name, rule in by_name.items() if name in layers}
    return by_name, rules


def _find_tensor_rule(
    name: str, by_name: Mapping[str, str], sequence_parallel: bool
) -> TensorRule | None:
    """Return what a tensor is: by its rule, that of the cut layer that has it, or of one around."""
    layer, _, attribute = name.rpartition(".")
    rule = by_name.get(name)
    layer_rule = by_name.get(layer)
    if layer_rule in CUTS and attribute in ("weight", "bias") and rule in (None, layer_rule):
        if layer_rule != "columns":
            return TensorRule(dim=0)
        if attribute == "weight":
            return TensorRule(dim=1)
        # the bias is added to the sum over ranks, and with sequence parallelism to some tokens
        return TensorRule(is_summed=sequence_parallel)
    if rule == "rows":
        return TensorRule(dim=0)
    for each in (name, *_ancestors(name)):
        rule = by_name.get(each)
        if rule == "block":
            return None  # rules around a block are not for what is in it
        if rule in REPLICATED:
            around = [by_name.get(other) for other in _ancestors(name)]
            if each == name and rule != "heads" and "block" in around:
                # layers are checked when they run (`_check_place`), a parameter cannot be
                raise ValueError(f"expected the rule 'heads' for {name}, which is in a block")
            is_summed = rule == "heads" or (rule == "tokens" and sequence_parallel)
            return TensorRule(is_summed=is_summed)
    return None


def _ancestors(name: str) -> Iterator[str]:
    """Yield the names of the layers around a layer or tensor, the nearest first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _check_layers(rules: Rules, layers: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for a layer that cannot be cut, or a rule that is wrong at its place."""
    for name, rule in rules.layers.items():
        layer = layers[name]
        kind = type(layer).__name__
        if rule in CUTS and find_cut_layer(layer, rule) is None:
            raise ValueError(f"expected a Linear or Embedding for {rule!r}: {name} is a {kind}")
        options = ("max_norm", "sparse", "scale_grad_by_freq")
        used = [option for option in options if getattr(layer, option, None)]
        if rule in CUTS and used:
            raise ValueError(
                f"expected {name} without {used[0]}, since each rank sees its rows only"
            )
        if rules.is_in_block(name) and rule in ("block", "vocabulary"):
            raise ValueError(f"expected no {rule!r} in a block, and {name} is in one")
        columns = [n for n, r in rules.layers.items() if r == "columns" and name in _ancestors(n)]
        if rule == "block" and not columns:
            raise ValueError(f"expected columns in the block {name}, whose outputs are summed")


def _check_lengths(
    rules: Rules, layers: Mapping[str, nn.Module], tensors: Mapping[str, Tensor], p: int
) -> None:
    """Raise ValueError if a rank got nothing of a tensor, a part of a head, or of a tied weight."""
    for name in rules.counts:
        layer, _, attribute = name.rpartition(".")
        count = getattr(layers[layer], attribute)
        if count % p:
            raise ValueError(f"expected {name} that {p} ranks divide, got {count}")
    dims: dict[Tensor, int | None] = {}
    for name, rule in rules.tensors.items():
        tensor = tensors[name]
        if rule.dim is not None and not all(part_lengths(tensor.shape[rule.dim], p)):
            length = tensor.shape[rule.dim]
            raise ValueError(f"expected {name} to have a part for each of {p} ranks, got {length}")
        if dims.setdefault(tensor, rule.dim) != rule.dim:
            raise ValueError(f"expected one cut of a tied weight, and {name} is cut in two ways")


def _check_sequence_parallel(rules: Rules, layers: Mapping[str, nn.Module]) -> None:
    """Raise ValueError unless tokens are cut before the first block, and all else is per token."""
    cut_embeddings = [
        name
        for name, rule in rules.layers.items()
        if rule == "vocabulary" and isinstance(layers[name], nn.Embedding)
    ]
    if not cut_embeddings:
        raise ValueError("expected an Embedding with the rule 'vocabulary', which cuts the tokens")
    for name, layer in layers.items():
        if rules.layers.get(name) == "whole":
            kind = type(layer).__name__
            raise ValueError(
                f"expected {name}, a {kind}, to work per token, with the rule 'tokens'; got 'whole'"
            )
