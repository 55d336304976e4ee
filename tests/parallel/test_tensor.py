"""Tensor parallelism computes what one process does, sends what its formula says, and needs every
message."""

import copy
import dataclasses
import io
import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

from labkit.costs import communication
from labkit.costs.transformer import TransformerShape
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.parallel.cut_tensors import ELEMENTWISE_OPTIMIZERS, CutGradient, CutParameter
from labkit.parallel.losses import IGNORED
from labkit.parallel.sharding import FSDP
from labkit.parallel.tensor import TensorParallel, tensor_parallel
from labkit.parallel.traffic import recorded_traffic
from labkit.parallel.transport import abort
from tests.parallel import own_model
from tests.parallel.model_parallel_cases import (
    EXACT,
    TOLERANCES,
    Attempts,
    assert_refused_everywhere,
    furthest,
    gradients,
)
from tests.parallel.shared_ranks import on_ranks

SHAPE = TransformerShape(d_model=24, d_ff=30, n_layers=2, n_heads=4, vocabulary=14)
TOKENS = (torch.arange(24) * 5 % 14).view(2, 12)
TARGETS = TOKENS.roll(3).masked_fill(torch.arange(24).view(2, 12) == 7, IGNORED)


def build(
    dtype: torch.dtype = torch.float64, *, seed: int = 0, shape: Any = SHAPE, **options: Any
) -> Transformer:
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        return Transformer(shape, context_length=12, **options)
    finally:
        torch.set_default_dtype(torch.float32)


@cache
def reference(dtype: torch.dtype) -> dict[str, Tensor]:
    model = build(dtype)
    logits = model(TOKENS)
    loss = language_model_loss(logits, TARGETS)
    loss.backward()
    return {"loss": loss.detach(), "logits": logits.detach(), **gradients(model)}


def compute(model: TensorParallel, *, from_parts: bool = True) -> dict[str, Tensor]:
    with torch.set_grad_enabled(not from_parts):
        logits = model(TOKENS)
    loss = model(TOKENS, TARGETS) if from_parts else language_model_loss(logits, TARGETS)
    loss.backward()
    return {
        "loss": loss.detach(),
        "logits": logits.detach(),
        **model.gather_state_dict(gradients(model)),
    }


@on_ranks(4, slow=(1, 2))
def test_parity() -> None:
    """Loss from parts and from whole logits, checkpointed or not, over three transports, in turns
    in two dtypes."""
    ways = (("auto", 0, True), ("torch", 1, True), ("point_to_point", 0, False))
    for place, (is_cut, (transport, segment, from_parts)) in enumerate(
        product((False, True), ways)
    ):
        for dtype in TOLERANCES if dist.get_world_size() == 2 else [[*TOLERANCES][place % 2]]:
            whole = build(dtype, seed=dist.get_rank(), checkpoint_segment=segment)
            model = tensor_parallel(whole, sequence_parallel=is_cut, transport=transport)
            expected = reference(dtype)
            result = compute(model, from_parts=from_parts)
            state = model.gather_state_dict()
            assert result.keys() == expected.keys()
            assert furthest(result, expected) <= TOLERANCES[dtype], (dtype, is_cut, transport)
            assert furthest(state, build(dtype).state_dict()) <= TOLERANCES[dtype]


@on_ranks(2)
def test_elementwise_optimizers() -> None:
    """They get ordinary tensors, which are faster; clipping in a closure gets all ranks' norm.

    Nor are passes of labkit's layers slowed down by questions of what they do with a part.
    """
    shape = dataclasses.replace(SHAPE, n_layers=1)
    for kind in ELEMENTWISE_OPTIMIZERS:
        whole = build(shape=shape)
        cut = tensor_parallel(build(shape=shape))
        expected = train_with_closure(
            kind(whole.parameters(), lr=1e-3),
            lambda model=whole: language_model_loss(model(TOKENS), TARGETS),
        )
        optimizer = kind(cut.parameters(), lr=1e-3)
        norms = train_with_closure(optimizer, lambda model=cut: model(TOKENS, TARGETS))
        torch.testing.assert_close(norms, expected, rtol=EXACT, atol=EXACT)
        seen = mock.Mock(side_effect=AssertionError(f"{kind.__name__}: an operator of the step"))
        with mock.patch.object(CutGradient, "__torch_function__", seen):
            optimizer.step()
        with mock.patch.object(CutParameter, "__torch_function__", seen):
            cut(TOKENS, TARGETS).backward()


def train_with_closure(optimizer: torch.optim.Optimizer, compute_loss: Callable[[], Any]) -> Tensor:
    """Return the norm of all gradients in two steps."""
    parameters = optimizer.param_groups[0]["params"]
    norms = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = compute_loss()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(parameters, 0.1))
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return torch.stack(norms)


@on_ranks(2)
def test_state_in_a_new_group() -> None:
    """Operators on parts send through the new group, not through one before it that is over."""
    shape = dataclasses.replace(SHAPE, vocabulary=22)  # of no other test: torch caches operators
    for is_first in (True, False):
        group = dist.new_group()
        state = tensor_parallel(build(shape=shape), group).state_dict()
        whole = state["module.output.weight"].mul(2).full_tensor()
        if is_first:
            dist.barrier()  # else a rank may close connections that the other one still needs
            abort(group)
    assert torch.equal(whole, 2 * build(shape=shape).output.weight)


@on_ranks(4)
def test_bytes() -> None:
    """A rank sends in a step what the formula says, but for the notes that ranks agree by."""
    p = dist.get_world_size()
    algorithm = communication.recursive_doubling  # these tensors are short
    for is_cut in (False, True):
        model = tensor_parallel(build(), sequence_parallel=is_cut)
        with recorded_traffic() as traffic:
            model(TOKENS, TARGETS).backward()
        calls = communication.tensor_parallel_calls(
            SHAPE, 2, 12, p, itemsize=8, sequence_parallel=is_cut
        )
        notes = [call.sent_bytes for call in traffic if call.dtype == "int64"]
        assert notes == [16 * (p - 1)]  # two int64
        sent = sum(call.sent_bytes for call in traffic if call.is_payload)
        assert sent == communication.sent_bytes(calls, p, all_reduce=algorithm)


@on_ranks(3)
def test_models() -> None:
    rank = dist.get_rank()
    narrow, fitting = (
        TransformerShape(24, d_ff, n_layers=1, n_heads=3, vocabulary=14) for d_ff in (2, 30)
    )
    attempts: Attempts = [
        ("n_heads that 3 ranks divide, got 4", lambda: tensor_parallel(build())),
        (
            "gate.weight to have a part for each of 3 ranks, got 2",
            lambda: tensor_parallel(build(shape=narrow)),
        ),
        ("patterns that match", lambda: tensor_parallel(nn.Linear(2, 2))),
        (
            "a transport among auto",
            lambda: tensor_parallel(build(shape=fitting), transport="carrier pigeon"),
        ),
        (
            "on every rank",
            lambda: tensor_parallel(build(shape=fitting), sequence_parallel=rank == 1),
        ),
        (
            "on every rank",
            lambda: tensor_parallel(build(torch.float64 if rank else torch.float32, shape=fitting)),
        ),
    ]
    assert_refused_everywhere(attempts)


@on_ranks(4)
def test_calls() -> None:
    rank = dist.get_rank()
    model = tensor_parallel(build(), sequence_parallel=True)
    tied = nn.Sequential(nn.Linear(24, 14, bias=False))
    tied[0].weight = model.module.embedding.weight
    attempts: Attempts = [
        ("same tokens", lambda: model(TOKENS.roll(rank))),
        ("same tokens", lambda: model(TOKENS[:, : 12 - rank])),
        ("a sequence that 4 ranks divide", lambda: model(TOKENS[:, :-1])),
        ("int64 targets", lambda: model(TOKENS, TARGETS[:, 1:])),
        ("tokens from 0 to 13", lambda: model(TOKENS + 3)),
        ("targets from 0 to 13", lambda: model(TOKENS, TARGETS + 3)),
        ("int64 tokens", lambda: model(TOKENS.float())),
        ("that is not cut", lambda: tensor_parallel(model.module)),
        ("that is not cut", lambda: tensor_parallel(tied, plan={"0": "vocabulary"})),
    ]
    assert_refused_everywhere(attempts)


@on_ranks(4)
def test_states_of_parts_in_shards() -> None:
    """A whole state goes through FSDP and the cut, and comes back."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    cut = tensor_parallel(build(seed=dist.get_rank()), mesh.get_group("tensor"))
    model = FSDP(cut, group=mesh.get_group("data"))
    for expected in (build().state_dict(), build(seed=9).state_dict()):
        state = cut.gather_state_dict(model.consolidated_state_dict(to=None))
        assert furthest(state, expected) == 0
        model.load_state_dict(build(seed=9).state_dict())


# Models of users


def own_batch() -> tuple[Tensor, Tensor]:
    tokens = (torch.arange(16) * 3 % own_model.VOCABULARY).view(2, 8)
    return tokens, tokens.roll(5).masked_fill(torch.arange(8) < 3, IGNORED)


@on_ranks(2)
def test_refused_plans() -> None:
    """What cannot be right is refused by name, on all ranks, before any change."""
    plan = own_model.PLAN

    def cut(rules: dict[str, str] | None = None, **options: Any) -> Callable[[], object]:
        model = own_model.build(**options)
        return lambda: tensor_parallel(model, plan=plan | (rules or {}), sequence_parallel=True)

    unnamed = {name: rule for name, rule in plan.items() if name != "*.q_norm"}
    misplaced = tensor_parallel(own_model.build(), plan=plan | {"*.q_norm": "tokens"})
    attempts: Attempts = [
        ("q_norm.weight", lambda: tensor_parallel(own_model.build(), plan=unnamed)),
        ("q.base.weight", cut(has_lora=True)),
        ("patterns that match", cut({"*.quereis": "rows"})),
        ("a rule among", cut({"*.[qkv]": "diagonals"})),
        ("norm1", cut({"*.norm1": "whole"})),
        ("attention.scale", cut({"*.scale": "tokens"})),
        ("a Linear or Embedding", cut({"*.norm1": "rows"})),
        ("same model", cut(None if dist.get_rank() else {"*.norm1": "heads"})),
        ("q_norm", lambda: misplaced(*own_batch())),
    ]
    assert_refused_everywhere(attempts)


@on_ranks(2)
def test_changes_after_the_cut() -> None:
    """Parameters that are added, replaced, or frozen on one rank are refused in forward."""

    def forward(change: Callable[[Any], object]) -> Callable[[], object]:
        model = tensor_parallel(own_model.build(), plan=own_model.PLAN)
        change(model.module)
        return lambda: model(own_batch()[0])

    def add(model: Any) -> None:
        model.blocks[1].attention.q = own_model.LoRA(model.blocks[1].attention.q)

    def replace(model: Any) -> None:
        model.norm.weight = nn.Parameter(model.norm.weight.detach().clone())

    def borrow(model: Any) -> None:
        model.norm = tensor_parallel(own_model.build(), plan=own_model.PLAN).module.norm

    def freeze(model: Any) -> None:
        model.norm.weight.requires_grad_(dist.get_rank() == 0)

    attempts: Attempts = [
        ("blocks.1.attention.q.a.weight was added", forward(add)),
        ("norm.weight was added or replaced", forward(replace)),
        ("norm.weight was added or replaced", forward(borrow)),
        ("rank 1 has frozen norm.weight, rank 0 does not", forward(freeze)),
    ]
    assert_refused_everywhere(attempts)


@on_ranks(2)
def test_own_gradients() -> None:
    """No targets give zeros, frozen parameters None; second derivatives are right or refused."""
    tokens, targets = own_batch()
    one = own_model.build()
    model = tensor_parallel(own_model.build(), plan=own_model.PLAN)
    for each in (one, model.module):
        each.embedding.requires_grad_(False)
        each.blocks[0].attention.scale.requires_grad_(False)
    model(tokens, torch.full_like(targets, IGNORED)).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert not any(grad is not None and grad.count_nonzero() for grad in grads.values())
    whole = model.gather_state_dict(grads)
    frozen = [name for name, parameter in one.named_parameters() if not parameter.requires_grad]
    assert [name for name, grad in whole.items() if grad is None] == frozen

    one = own_model.build()
    model = tensor_parallel(own_model.build(), plan=own_model.PLAN)
    for each, inside in ((one, one), (model, model.module)):
        loss = language_model_loss(each(tokens), targets)
        attention = inside.blocks[0].attention
        # whole; applied to this rank's heads; cut, of which a penalty is over all parts
        chosen = [inside.norm.weight, attention.q_norm.weight, attention.q.weight]
        first = torch.autograd.grad(loss, chosen, create_graph=True)
        squares: Any = sum(grad.square().sum() for grad in first)
        (loss + squares.sqrt()).backward()
    assert furthest(model.gather_state_dict(gradients(model)), gradients(one)) <= EXACT
    loss = model(tokens, targets)
    again: Attempts = [("create_graph=False", lambda: loss.backward(create_graph=True))]
    assert_refused_everywhere(again)


@on_ranks(2)
def test_dropout() -> None:
    """With one seed, ranks drop different positions of heads, and the same of what all have."""
    for is_cut in (False, True):
        model = tensor_parallel(
            own_model.build(dropout=0.5), plan=own_model.PLAN, sequence_parallel=is_cut
        )
        dropped: dict[str, Tensor] = {}
        attention = model.module.blocks[1].attention
        for name in ("head_dropout", "dropout"):
            getattr(attention, name).register_forward_hook(
                lambda _, inputs, output, into=dropped, name=name: into.update({name: output == 0})
            )
        torch.manual_seed(7)
        model(*own_batch())
        for name, differs in (("head_dropout", True), ("dropout", is_cut)):
            first = dropped[name].float()
            dist.broadcast(first, 0)
            is_same = torch.tensor(torch.equal(first, dropped[name].float()) * 1.0)
            dist.all_reduce(is_same)
            assert (is_same == 2) != differs, (is_cut, name)
        states = [torch.empty(5056, dtype=torch.uint8) for _ in range(2)]
        dist.all_gather(states, torch.get_rng_state())
        assert torch.equal(*states), "random numbers differ afterwards"


class ReadsDevice(own_model.Block):
    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros(own_model.D, device=self.up.weight.device, dtype=x.dtype)
        # a layer by hand after an operator on its part, in one graph or two
        nn.functional.linear(x, self.up.weight.abs())
        return super().forward(x) + zeros


@on_ranks(2)
def test_a_compiled_block_may_read_the_device_of_a_part() -> None:
    whole = own_model.build()
    for block in whole.blocks:
        block.__class__ = ReadsDevice
    model = tensor_parallel(whole, plan=own_model.PLAN)
    tokens = own_batch()[0]
    expected = model(tokens)
    for block in model.module.blocks:
        block.compile(backend="eager")
    torch.testing.assert_close(model(tokens), expected)


@on_ranks(2)
def test_states(tmp_path: Path) -> None:
    """Parts are saved and loaded, copied and drawn as one model; a part is never taken for it."""
    model = tensor_parallel(own_model.build(), plan=own_model.PLAN, sequence_parallel=True)
    whole = model.gather_state_dict()
    expected = own_model.build().state_dict()
    assert furthest(whole, expected) == 0

    checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    other = tensor_parallel(own_model.build(seed=1), plan=own_model.PLAN)
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state["model"])
    assert furthest(other.gather_state_dict(), expected) == 0
    other.load_state_dict(own_model.build(seed=2).state_dict())
    assert furthest(other.gather_state_dict(), own_model.build(seed=2).state_dict()) == 0

    copied = copy.deepcopy(model)
    for each in (model, copied):
        each(*own_batch()).backward()
    assert furthest(gradients(copied), gradients(model)) == 0
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (model, copied)]
    assert norms[0] == norms[1]

    one = own_model.build()
    for each in (one, model.module):
        torch.manual_seed(5)
        for layer in each.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    assert furthest(model.gather_state_dict(), one.state_dict()) == 0

    parts = {name: parameter.detach() for name, parameter in model.module.named_parameters()}
    attempts: Attempts = [
        ("all of", lambda: model.load_state_dict(parts)),
        ("gather_state_dict()", lambda: torch.save(model, io.BytesIO())),
    ]
    assert_refused_everywhere(attempts)


@on_ranks(2)
def test_states_of_a_block_that_is_put_into_another_module() -> None:
    """Its parameters have other names then, as `torch.compile(block)` gives them."""
    one = own_model.build()
    model = tensor_parallel(own_model.build(), plan=own_model.PLAN)
    for each in (one, model.module):
        each.blocks[1] = nn.Sequential(each.blocks[1])
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each(*own_batch()).backward()
        assert furthest(each.gather_state_dict(), one.state_dict()) == 0
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (model, copied)]
    assert norms[0] == norms[1]
    for name, value in model.state_dict().items():
        shape = one.state_dict()[name.removeprefix("module.")].shape
        assert value.shape == shape, name
    model.load_state_dict({name: 2 * value for name, value in one.state_dict().items()})
    whole = model.gather_state_dict()
    assert furthest(whole, {name: 2 * value for name, value in one.state_dict().items()}) == 0


@on_ranks(2)
def test_optimizer_states_of_a_block_that_is_put_into_another_module() -> None:
    """They are saved and loaded as one process's, which `torch.compile(block)` does not rename."""
    wraps: list[Callable[[Any], Any]] = [nn.Sequential, partial(torch.compile, backend="eager")]
    tokens, targets = own_batch()
    for wrap in wraps:
        one = own_model.build()
        model = tensor_parallel(own_model.build(), plan=own_model.PLAN)
        for each in (one, model.module):
            each.blocks[1] = wrap(each.blocks[1])
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (one, model)]
        language_model_loss(one(tokens), targets).backward()
        model(tokens, targets).backward()
        for optimizer in optimizers:
            optimizer.step()
        of_one = get_optimizer_state_dict(one, optimizers[0])
        saved = model.optimizer_state_dict(optimizers[1])
        for state in (saved, of_one):
            loaded = torch.optim.AdamW(model.parameters(), lr=0.5)
            model.load_optimizer_state_dict(loaded, state)
            parts = model.optimizer_state_dict(loaded)
            assert parts["param_groups"][0]["lr"] == 0.01
            assert len(parts["state"]) == len(of_one["state"])
            for name, values in parts["state"].items():
                whole = {
                    key: value.full_tensor() if hasattr(value, "to_local") else value
                    for key, value in values.items()
                }
                expected = of_one["state"][name.removeprefix("module.")]
                assert furthest(whole, expected) <= EXACT, name


@on_ranks(4)
def test_optimizer_states(tmp_path: Path) -> None:
    """A training on two ranks goes on, with its optimizer's state, on four, on one and on two."""
    rank = dist.get_rank()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    alone = [dist.new_group([each]) for each in range(4)][rank]

    def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            targets = TARGETS.roll(step)
            if isinstance(model, TensorParallel):
                model(TOKENS, targets).backward()
            else:
                language_model_loss(model(TOKENS), targets).backward()
            optimizer.step()

    def make(group: Any, seed: int = 0) -> tuple[TensorParallel, torch.optim.Optimizer]:
        model = tensor_parallel(build(seed=seed), group)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}
        return model, torch.optim.AdamW([{"params": matrices}, others], lr=0.01, weight_decay=0.3)

    def state_of(model: TensorParallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}

    one = make(alone)
    train(*one, range(4))
    expected = one[0].gather_state_dict()
    saved = make(pair)
    train(*saved, range(2))
    checkpoint.save(state_of(*saved), checkpoint_id=tmp_path)
    for group in (None, alone, pair):
        model, optimizer = make(group, seed=1)
        state = state_of(model, optimizer)
        checkpoint.load(state, checkpoint_id=tmp_path)
        model.load_state_dict(state["model"])
        model.load_optimizer_state_dict(optimizer, state["optimizer"])
        train(model, optimizer, range(2, 4))
        assert furthest(model.gather_state_dict(), expected) <= EXACT, dist.get_world_size(group)
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, optimizer, range(2))
    state = copy.deepcopy(get_optimizer_state_dict(plain, optimizer))
    model = tensor_parallel(build(), pair)
    model.load_state_dict(plain.state_dict())
    loaded = torch.optim.AdamW(model.parameters(), lr=0.5)
    model.load_optimizer_state_dict(loaded, state)
    train(plain, optimizer, range(2, 4))
    train(model, loaded, range(2, 4))
    assert furthest(model.gather_state_dict(), plain.state_dict()) <= EXACT
    with pytest.raises(ValueError, match="got one of head"):
        model.load_optimizer_state_dict(loaded, {**state, "state": {"head": {}}})


@on_ranks(2)
def test_a_rank_that_gathers_alone_says_so() -> None:
    model = tensor_parallel(own_model.build(), plan=own_model.PLAN)
    signal = torch.zeros(1)
    if dist.get_rank() == 1:
        dist.recv(signal, 0)
        model.gather_state_dict()
        return
    texts = []

    def show(text: Warning | str, *_: Any) -> None:
        texts.append(str(text))
        dist.send(signal, 1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]
        model.gather_state_dict()
    assert ["gather_state_dict()" in text for text in texts] == [True]
