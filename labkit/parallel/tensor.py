"""Tensor parallelism: matrices of a model are cut over ranks, which exchange activations.

    model = tensor_parallel(Transformer(shape, context_length=1024))
    loss = model(tokens, targets)        mean cross-entropy; logits stay in parts
    loss.backward()                      gradients of this rank's parts of the parameters
    logits = model(tokens)               whole, on every rank

Every rank gets the same inputs. A plan says what happens to each layer:

    rule        torch's style       the layer
    rows        ColwiseParallel     a Linear of which each rank has some outputs, such as heads; or
                                    a parameter or buffer cut in its first dimension
    columns     RowwiseParallel     a Linear of which each rank has some inputs; outputs are summed
    vocabulary  RowwiseParallel     an Embedding with some of its rows, or the Linear to the logits
    block       PrepareModuleInput  has rows and columns; its input enters once, not per layer
    heads       -                   whole on every rank, and applied to its heads or features
    tokens      SequenceParallel    whole on every rank, and applied to each token: norms, dropout
    whole       -                   whole on every rank, and applied to what all ranks have
    count       -                   an integer attribute, such as n_heads, to be divided by p

With sequence parallelism, activations between blocks are cut over the tokens. It sends the same
bytes, and each rank keeps 1/p of them. A norm then sees this rank's tokens only, and the gradients
of its parameters are summed over ranks. All that works on these must be per token.

The loss exchanges two numbers per token and rank. Every collective of a step is in
`labkit.costs.communication.tensor_parallel_calls`. p ranks.

Sources: Shoeybi et al. 2019 (arXiv:1909.08053), section 3; Korthikanti et al. 2022
(arXiv:2205.05198), section 4.2.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.agreement import (
    agree_once,
    agree_per_pass,
    describe_parameter,
    describe_values,
    wait_for_ranks,
)
from labkit.parallel.backward_pass import report_failures
from labkit.parallel.data_parallel.consistency import broadcast
from labkit.parallel.layouts import Layout, add_layout, each_parameter, get_layouts
from labkit.parallel.losses import IGNORED
from labkit.parallel.tensor_collectives import TORCH, Ranks, cut
from labkit.parallel.tensor_layers import (
    VocabularyLinear,
    VocabularyLoss,
    check_indices,
    first_row,
)
from labkit.parallel.tensor_plan import (
    TRANSFORMER_PLAN,
    Rules,
    apply_rules,
    named_tensors,
    read_plan,
)
from labkit.parallel.tensor_state import (
    get_optimizer_state,
    load_parts,
    save_parts,
    set_optimizer_state,
)
from labkit.parallel.transport import AUTO, CHOICES, Group, member_group
from labkit.torch_private import DisableTorchFunctionSubclass

# labkit's collectives over a transport, or those of torch.distributed
TRANSPORTS = (*CHOICES, TORCH)


def tensor_parallel(
    model: nn.Module,
    group: Group = None,
    *,
    plan: Mapping[str, str] = TRANSFORMER_PLAN,
    sequence_parallel: bool = False,
    transport: str = AUTO,
) -> TensorParallel:
    """Cut a model over the ranks of `group` (None: all) by a plan, in place. A collective.

    `plan`: rules of layers, parameters or attributes by name, in which * stands for anything. The
    model is whole on every rank before, and takes the values of the group's rank 0. A part has the
    length that `torch.chunk` gives it.

    `transport`: "auto", "shared" or "point_to_point" for labkit's collectives; "torch" for those of
    torch.distributed.

    Raises ValueError, on all ranks, for a parameter that no rule names, a rule that names nothing
    or cannot cut its layer, for heads that p does not divide, for fewer rows than ranks, and if
    models or arguments differ between ranks.
    """
    members = member_group(group)

    def describe() -> dict[str, object]:
        if transport not in TRANSPORTS:
            raise ValueError(
                f"expected a transport among {', '.join(TRANSPORTS)}, got {transport!r}"
            )
        read_plan(model, plan, members.size(), sequence_parallel)  # raises what must be refused
        tensors = {name: describe_parameter(p) for name, p in model.named_parameters()}
        options = {"sequence_parallel": sequence_parallel, "transport": transport}
        return {**options, "plan": [*plan.items()], **tensors}

    agree_once("model", describe, members)
    broadcast([*model.parameters(), *model.buffers()], members)
    rules = read_plan(model, plan, members.size(), sequence_parallel)
    return TensorParallel(model, rules, Ranks(members, transport, sequence_parallel))


class TensorParallel(nn.Module):
    """A model cut over ranks: `module` has this rank's parts; call it through this wrapper only.

    Its `state_dict` has parts as DTensors, for `torch.distributed.checkpoint`. It can be copied by
    `copy.deepcopy`, and loads whole tensors and DTensors.
    """

    def __init__(self, model: nn.Module, rules: Rules, ranks: Ranks) -> None:
        super().__init__()
        self.module: Any = model
        self._ranks = ranks
        self._layouts: dict[str, Layout] = {}
        apply_rules(model, rules, ranks)
        self._keep_parts(rules)
        for name, parameter in model.named_parameters():
            add_layout(parameter, self._layouts[name])
        # in a list, since it is a layer of `module` alone
        self._heads = [layer for layer in model.modules() if isinstance(layer, VocabularyLinear)]
        report_failures(self, ranks.group)
        self.register_state_dict_post_hook(save_parts)
        self.register_load_state_dict_pre_hook(load_parts)

    def _keep_parts(self, rules: Rules) -> None:
        """Keep this rank's parts. A tensor that several layers have stays one."""
        group = self._ranks.group
        parts: dict[Tensor, Layout] = {}  # of tied weights, by the one tensor that has all names
        for name, tensor in named_tensors(self.module):
            if name not in rules.tensors:
                continue  # a buffer
            dim = rules.tensors[name].dim
            copies = group.size() if dim is None else 1
            if tensor not in parts:
                parts[tensor] = Layout(group, dim, copies, tensor.shape)
                if dim is not None:
                    # the parameter stays the same object: optimizers made before may have it
                    tensor.data = cut(tensor.data, parts[tensor])
                    tensor.grad = None
            self._layouts[name] = parts[tensor]

    def layouts_by_name(self) -> dict[str, Layout]:
        """Return how ranks have each tensor, by the names at the cut and those of today.

        Names change if a layer is put into another module, as `torch.compile(block)` does. A state
        under a new name would be saved as if this rank's part were all of it.
        """
        layouts = dict(self._layouts)
        own = {*self._layouts.values()}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            for layout in own.intersection(get_layouts(parameter)):
                layouts[name] = layout
        return layouts

    def _describe_parameters(self) -> dict[str, str]:
        """Return which parameters are frozen. ValueError for one that the cut did not see.

        The ranks would have other values of it, and its gradient might be a part of a sum.
        """
        # A layer of another cut model has layouts too, perhaps of other ranks.
        own = {*self._layouts.values()}
        with DisableTorchFunctionSubclass():  # reading an attribute takes a tenth of the time
            is_as_cut = [
                parameter.requires_grad and not own.isdisjoint(get_layouts(parameter))
                for parameter in each_parameter(self.module)
            ]
        if all(is_as_cut):
            return {}
        # Names only now: finding them takes longer than all else in the agreement.
        description = {}
        for name, parameter in self.module.named_parameters():
            if own.isdisjoint(get_layouts(parameter)):
                raise ValueError(
                    f"{name} was added or replaced after the cut (by an adapter, assign=True or"
                    " to_empty()): change the model, then cut it"
                )
            if not parameter.requires_grad:
                description[f"frozen {name}"] = ""
        return description

    def forward(self, inputs: Any, targets: Any = None, **options: Any) -> Any:
        """Compute the model's outputs; with targets (B, S), int64, the mean loss of its logits.

        Inputs are alike on all ranks. Targets go to the model if no Linear has the rule
        "vocabulary".

        Raises ValueError, on all ranks, for inputs and targets that differ between ranks, for other
        shapes, with sequence parallelism for a sequence that p does not divide, and if parameters
        were added or replaced, or are trained on some ranks only.
        """
        batch = {"tokens": inputs, "targets": targets, **options}
        group = self._ranks.group

        def describe() -> dict[str, object]:
            # Ranks with other shapes would hang, and with other tokens compute nonsense.
            return {**_describe_batch(batch, group), **self._describe_parameters()}

        agree_per_pass("tokens, targets and trained parameters", describe, group)
        if targets is None:
            return self.module(inputs, **options)
        if not self._heads:
            return self.module(inputs, targets, **options)
        if targets.shape != inputs.shape or targets.dtype != torch.int64:
            got = f"{tuple(targets.shape)}, {targets.dtype}"
            raise ValueError(f"expected int64 targets in the shape of the tokens, got {got}")
        head = self._heads[-1]
        rows = head.out_features
        check_indices("targets", targets.masked_fill(targets == IGNORED, 0), rows)
        # All else in the model, such as a factor of the logits, works on parts, too.
        head.gathers = False
        try:
            parts = self.module(inputs, **options)  # (B, S, V / p)
        finally:
            head.gathers = True
        return VocabularyLoss.apply(parts, targets, first_row(self._ranks, rows), self._ranks)

    @torch.no_grad()
    def gather_state_dict(self, state: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the whole model's `state_dict`, on every rank. A collective.

        `state`: this rank's parts, by name, if something else holds them: gradients, of which some
        may be None on all ranks, or FSDP's `consolidated_state_dict(to=None)`.
        """
        # saving is what programs do on rank 0 alone
        wait_for_ranks("gather_state_dict()", self._ranks.group)
        if state is None:
            state = self.module.state_dict()
        layouts = self.layouts_by_name()
        whole: dict[str, Any] = {}
        for full_name, value in state.items():
            name = full_name.removeprefix("module.")
            part = value.to_local() if hasattr(value, "to_local") else value
            layout = layouts.get(name)
            if layout is not None and layout.dim is not None and part is not None:
                whole[name] = self._ranks.join(part, layout)
            else:
                whole[name] = None if part is None else part.clone()
        return whole

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an optimizer's state by name, with parts as DTensors, as `state_dict` has them.

        For `torch.distributed.checkpoint`, to save, or to load into. The optimizer has this model's
        parameters and treats each element alone, as SGD and Adam do.
        """
        return get_optimizer_state(self, optimizer)

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        """Load an `optimizer_state_dict` that `torch.distributed.checkpoint` has filled.

        Or one process's, as `get_optimizer_state_dict` of torch's checkpoints returns it.
        """
        set_optimizer_state(self, optimizer, state_dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        vars(clone).update(copy.deepcopy(vars(self), memo))
        own = {*self._layouts.values()}
        # torch copies parameters without hooks and attributes
        for parameter, copied in zip(self.parameters(), clone.parameters(), strict=True):
            for layout in own.intersection(get_layouts(parameter)):
                add_layout(copied, layout)
        return clone

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(
            "expected a state dict, since a cut model has a process group: save"
            " model.gather_state_dict(), or model.state_dict() with torch.distributed.checkpoint"
        )


def _describe_batch(batch: Mapping[str, Any], group: dist.ProcessGroup) -> dict[str, object]:
    """Describe what all ranks must have alike: integers by value, activations by shape."""
    description: dict[str, object] = {}
    for name, value in batch.items():
        if isinstance(value, Tensor):
            description[name] = f"{tuple(value.shape)} {value.dtype}"
            if not value.is_floating_point():
                description[name] = describe_values(value, group)
    return description
