"""`verify` names each of 14 planted faults, and passes 14 right ways to train in parallel."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.costs.transformer import SIZES, TransformerShape
from labkit.nn.transformer import RMSNorm, Transformer, language_model_loss
from labkit.parallel import context_attention, pipeline
from labkit.parallel.context import context_parallel, gather_attention
from labkit.parallel.data_parallel import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from labkit.parallel.gradients import clip_grad_norm_
from labkit.parallel.losses import IGNORED, mean_loss, next_tokens, summed_loss
from labkit.parallel.pipeline import Pipeline
from labkit.parallel.sharding import FSDP
from labkit.parallel.tensor import tensor_parallel
from labkit.parallel.verify import Parallel, Verification, over_sequence, verify
from labkit.parallel.verify_causes import Case, explain_gradient
from tests.parallel.model_parallel_cases import TiedHead, masked_mean
from tests.parallel.shared_ranks import on_ranks

SHAPE = TransformerShape(d_model=16, d_ff=24, n_layers=2, n_heads=4, vocabulary=12)
TOKENS = (torch.arange(64) * 5 % 11).view(4, 16)
TARGETS = next_tokens(TOKENS)
MASKED = TARGETS.clone()
MASKED[1, :12] = MASKED[3, 6:] = IGNORED  # other numbers of targets in each half of the batch


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    embedding = nn.Embedding(12, 8)
    return [embedding, nn.Linear(8, 8), nn.Tanh(), RMSNorm(8), TiedHead(embedding)]


def tied(dtype: torch.dtype = torch.float32) -> Any:
    return nn.Sequential(*layers()).to(dtype), masked_mean


def frozen() -> Any:
    model, loss = tied()
    model[1].weight.requires_grad_(False)
    return model, loss


def transformer(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return Transformer(SHAPE, context_length=16).to(dtype), masked_mean


def unmasked() -> Any:
    torch.manual_seed(0)
    return Transformer(SHAPE, context_length=16), language_model_loss


def dead() -> Any:
    return tied()[0], lambda logits, targets: (0 * logits).sum()


def wide() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 64), nn.Dropout(0.5)), masked_mean


def half(x: Tensor, rank: int) -> Tensor:
    return x.chunk(2)[rank]


def averaged(
    model: nn.Module,
    change: Callable[[str, Tensor], None],
    loss: Any = mean_loss,
) -> Parallel:
    """Data parallelism by hand: `change` makes each gradient that of the whole batch."""

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        value = loss(model(inputs), targets)
        value.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            change(name, parameter.grad)
        return value

    return Parallel(model=model, step=step, split=half)


def mean(name: str, grad: Tensor) -> None:
    dist.all_reduce(grad.div_(2))


def without_rank_1(name: str, grad: Tensor) -> None:
    if dist.get_rank() == 1:
        grad.zero_()
    mean(name, grad)


def norms_not_summed(model: nn.Module) -> Parallel:
    """Gradients are parts of sums, as with sequence parallelism."""

    def change(name: str, grad: Tensor) -> None:
        grad.div_(2)
        if name != "3.gain":
            dist.all_reduce(grad)

    return averaged(model, change)


class Gather(torch.autograd.Function):
    """All ranks' columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.chunk(2, -1)[dist.get_rank()]


class Copy(torch.autograd.Function):
    """The same inputs on all ranks; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Columns(nn.Module):
    """A linear layer and dropout, cut by output features."""

    def __init__(self, whole: nn.Sequential, bias_of: int) -> None:
        super().__init__()
        self.embedding = whole[0]
        self.linear = nn.Linear(8, 32)
        self.dropout = whole[2]
        weight = whole[1].weight.detach().chunk(2)[dist.get_rank()]
        self.linear.weight = nn.Parameter(weight.clone())
        self.linear.bias = nn.Parameter(whole[1].bias.detach().chunk(2)[bias_of].clone())

    def forward(self, tokens: Tensor) -> Tensor:
        columns = self.linear(Copy.apply(self.embedding(tokens)))
        return Gather.apply(self.dropout(columns))


def by_columns(whole: nn.Sequential, is_slice_wrong: bool = False, fork: bool = False) -> Parallel:
    rank = dist.get_rank()
    model = Columns(whole, 0 if is_slice_wrong else rank)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        if fork:
            torch.manual_seed(rank)
        loss = masked_mean(model(inputs), targets)
        loss.backward()
        return loss

    def gather(local: dict[str, Tensor]) -> dict[str, Tensor]:
        result = {"0.weight": local["embedding.weight"]}
        for name in ("weight", "bias"):
            parts = [torch.empty_like(local[f"linear.{name}"]) for _ in range(2)]
            dist.all_gather(parts, local[f"linear.{name}"].contiguous())
            result[f"1.{name}"] = torch.cat(parts)
        return result

    def clip(max_norm: float) -> Tensor:
        # the embedding is on both ranks
        squares = torch.stack([p.grad.square().sum() for p in model.linear.parameters()]).sum()
        dist.all_reduce(squares)
        norm = (squares + model.embedding.weight.grad.square().sum()).sqrt()
        for parameter in model.parameters():
            parameter.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1))
        return norm

    return Parallel(model=model, step=step, gather=gather, clip=clip)


def by_stages(model: nn.Sequential, is_clip_local: bool = False, **options: Any) -> Parallel:
    pipe = Pipeline([*model], micro_batches=2, **options)

    def clip(max_norm: float) -> Tensor:
        if is_clip_local:
            return nn.utils.clip_grad_norm_(pipe.parameters(), max_norm)
        return clip_grad_norm_(pipe.parameters(), max_norm, [pipe.group])

    return Parallel(
        model=pipe,
        step=lambda inputs, targets: pipe.step(inputs, targets, summed_loss),
        clip=clip,
    )


def by_positions(model: Any, layout: str = "zigzag", **options: Any) -> Parallel:
    wrapped = BucketedDDP(context_parallel(model, layout=layout, **options))
    return over_sequence(wrapped, layout=layout)


def shifted_locally(model: Any) -> Parallel:
    right = by_positions(model, "contiguous")

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        return right.step(inputs, next_tokens(inputs))

    return Parallel(model=right.model, step=step, split=right.split)


def stale(model: Any) -> Parallel:
    """Each rank takes its own block in the place of the others'."""

    def blocks(ring: Any, k: Tensor, v: Tensor) -> Any:
        for step in range(ring.p):
            yield (ring.rank - step) % ring.p, torch.stack([k, v])

    right = by_positions(model)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with patch.object(context_attention._Ring, "blocks", blocks):
            return right.step(inputs, targets)

    return Parallel(model=right.model, step=step, split=right.split)


def tied_once(model: Any) -> Parallel:
    right = by_stages(model)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with patch.object(pipeline, "sum_tied", lambda *arguments: None):
            return right.step(inputs, targets)

    return Parallel(model=right.model, step=step, clip=right.clip)


Make = Callable[[], Any]
Plan = Callable[[Any], Any]

FAULTS: dict[str, tuple[Make, Plan, Tensor, str, str]] = {
    "not averaged": (
        tied,
        lambda model: averaged(model, lambda name, grad: None),
        MASKED,
        "0.weight",
        "not averaged",
    ),
    "averaged twice": (
        tied,
        lambda model: averaged(model, lambda name, grad: mean(name, grad.div_(2))),
        MASKED,
        "0.weight",
        "averaged twice",
    ),
    "times p": (
        tied,
        lambda model: averaged(model, lambda name, grad: dist.all_reduce(grad)),
        MASKED,
        "0.weight",
        "times 2",
    ),
    "one rank left out": (
        unmasked,
        lambda model: averaged(model, without_rank_1, language_model_loss),
        TARGETS,
        "embedding.weight",
        "rank 1's part",
    ),
    "norms not summed": (tied, norms_not_summed, MASKED, "3.gain", "not summed"),
    "tied weights summed once": (tied, tied_once, MASKED, "0.weight", "tied weights summed once"),
    "wrong slice of a bias": (
        wide,
        partial(by_columns, is_slice_wrong=True),
        MASKED,
        "1.bias",
        "wrong slice",
    ),
    "stale block in a ring": (transformer, stale, MASKED, "embedding.weight", "stale"),
    "labels shifted after the split": (
        transformer,
        shifted_locally,
        TARGETS,
        "embedding.weight",
        "labels are shifted",
    ),
    "mean of means": (transformer, BucketedDDP, MASKED, "embedding.weight", "mean of means"),
    "clip by the local norm": (
        tied,
        partial(by_stages, is_clip_local=True),
        MASKED,
        "",
        "local norm",
    ),
    "dropout equal on heads": (wide, by_columns, MASKED, "dropout", "same positions"),
    "a dead model": (dead, partial(averaged, change=mean), MASKED, "", "nothing was trained"),
    "a frozen parameter decayed": (
        frozen,
        partial(averaged, change=mean),
        MASKED,
        "1.weight",
        "decayed",
    ),
}
"""Model, what is done to it, targets; the parameter that must be named, and the cause."""

RIGHT: dict[str, tuple[Make, Plan, Tensor]] = {
    "by hand, float64": (
        partial(tied, torch.float64),
        partial(averaged, change=mean),
        MASKED,
    ),
    "naive": (unmasked, NaiveDDP, TARGETS),
    "flat": (unmasked, FlatDDP, TARGETS),
    "overlapped": (unmasked, OverlappedDDP, TARGETS),
    "bucketed, tied": (tied, BucketedDDP, TARGETS),
    "torch": (unmasked, nn.parallel.DistributedDataParallel, TARGETS),
    "FSDP": (unmasked, FSDP, TARGETS),
    "FSDP, frozen": (frozen, partial(FSDP, reshard_after_backward=False), TARGETS),
    "tensor": (transformer, tensor_parallel, MASKED),
    "tensor and sequence, float64": (
        partial(transformer, torch.float64),
        partial(tensor_parallel, sequence_parallel=True),
        MASKED,
    ),
    "columns": (wide, partial(by_columns, fork=True), MASKED),
    "pipeline, tied": (tied, by_stages, MASKED),
    "interleaved, frozen, recomputed": (
        frozen,
        partial(by_stages, schedule="interleaved", recompute=True),
        MASKED,
    ),
    "zigzag ring": (transformer, by_positions, MASKED),
    "contiguous, gathered": (
        partial(transformer, torch.float64),
        partial(by_positions, layout="contiguous", attention=gather_attention),
        MASKED,
    ),
}


def verify_twice(make: Make, parallelize: Plan, targets: Tensor) -> Verification:
    batches = [(TOKENS, targets), (TOKENS.roll(1, 0), targets.roll(1, 0))]
    return verify(make, parallelize, batches)


PAGE = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
PRINTED = [
    line.split("|")[-2] for line in PAGE.split("| fault |")[1].split("\n\n")[0].splitlines()[2:]
]
"""What the page says is printed, by fault."""


@on_ranks(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_as_in_the_docs(fault: str) -> None:
    *case, name, cause = FAULTS[fault]
    result = verify_twice(*case)
    assert not result
    assert result.name == name
    assert cause in str(result)
    assert len(PRINTED) == len(FAULTS)
    for part in PRINTED[list(FAULTS).index(fault)].split("..."):
        assert part.strip(" ,") in str(result)


@on_ranks(2)
@pytest.mark.parametrize("training", RIGHT)
def test_a_right_training_passes(training: str) -> None:
    result = verify_twice(*RIGHT[training])
    assert result, str(result)


@on_ranks(2)
def test_an_optimizer_that_sees_a_part_of_a_matrix_is_named() -> None:
    optimizer = partial(torch.optim.Adafactor, lr=0.1)
    columns = partial(by_columns, fork=True)
    result = verify(wide, columns, [(TOKENS, MASKED)], optimizer=optimizer)
    assert [bool(result), result.what, result.name] == [False, "parameter", "1.weight"]
    assert "optimizer" in result.cause
    assert "a part of it" in result.cause
    of_all = partial(averaged, change=mean)
    assert verify(tied, of_all, [(TOKENS, MASKED)], optimizer=optimizer)


@on_ranks(2)
def test_a_rank_whose_data_does_not_matter_is_no_test() -> None:
    targets = TARGETS.clone()
    targets[2:] = IGNORED
    result = verify(tied, partial(averaged, change=mean), [(TOKENS, targets)])
    assert result.verdict == "refused"
    assert "rank 1" in result.cause


def test_the_example_of_the_docs_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Trains in a tenth of the time.
    monkeypatch.setitem(SIZES, "nano", replace(SHAPE, vocabulary=64))
    exec(PAGE.split("```python\n")[1].split("```")[0], {"__name__": "__main__"})
    assert capsys.readouterr().out == "['equal', 'equal']\n"


def noisy(name: str, grad: Tensor) -> None:
    """Average, and add what rounding of the model's dtype does not explain, on each rank alone."""
    mean(name, grad)
    generator = torch.Generator().manual_seed(dist.get_rank())
    grad.add_(1e-4 * grad.abs().max() * torch.randn(grad.shape, generator=generator))


# In bfloat16 half a gradient is hardly more than what rounding explains: every pattern is near.
IN_BFLOAT16 = {
    "not averaged": (tied, FAULTS["not averaged"][1], MASKED),
    "averaged twice": (tied, FAULTS["averaged twice"][1], MASKED),
    "one rank left out": (unmasked, FAULTS["one rank left out"][1], TARGETS),
}


@on_ranks(2)
@pytest.mark.parametrize("fault", IN_BFLOAT16)
def test_a_fault_is_named_where_rounding_nearly_hides_it(fault: str) -> None:
    make, parallelize, targets = IN_BFLOAT16[fault]
    result = verify(make, parallelize, [(TOKENS, targets)], dtype=torch.bfloat16)
    assert FAULTS[fault][-1] in result.cause


@on_ranks(2)
def test_a_cause_is_named_only_if_it_explains_most_of_the_error() -> None:
    result = verify(unmasked, partial(averaged, change=noisy), [(TOKENS, TARGETS)])
    assert "drift" in result.cause or "no known pattern" in result.cause


def of_one_parameter() -> Case:
    return Case(nn.Linear(2, 8, bias=False), None, (torch.ones(1, 2), torch.ones(1, 8)), 2)


def explain(values: list[Tensor], right: Tensor, tolerance: float) -> str:
    case = of_one_parameter()
    case.ranks = len(values)
    with patch.object(Case, "part_gradients", lambda self: []):
        return explain_gradient(case, "weight", values, {"weight": right}, tolerance)


def test_the_rank_that_is_off_is_explained() -> None:
    right = torch.randn(8, 2, dtype=torch.float64)
    off = right.clone()
    off[3] += 0.25
    assert "from 3 to 3" in explain([right, off], right, 0.1)


def test_values_that_differ_by_rounding_are_one_value() -> None:
    right = torch.randn(8, 2, dtype=torch.float64)
    halves = [right / 2 + 0.01 * torch.randn_like(right) for _ in range(2)]
    assert "averaged twice" in explain(halves, right, 0.02)
    noisy = [right + 0.1 * torch.randn_like(right) for _ in range(16)]
    assert "not averaged" not in explain(noisy, right, 0.02)
