"""labkit behind the adapters of a public course (Stanford CS336, assignment 2): functions of these
names and arguments.

What its tests ask of an implementation is asked here, by models and checks of labkit's own: equal
to training on the whole batch in one process, gradients shaped as what a rank has of a parameter,
and in its dtype; no warning, under torch's deterministic algorithms and anomaly detection.
"""

import copy
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.functional import cross_entropy

from labkit.nn.transformer import RMSNorm
from labkit.parallel.collectives import all_reduce
from labkit.parallel.sharding import FSDP, whole_parameters
from tests.parallel.data_parallel_cases import built, distance, state_of, train
from tests.parallel.sharding_cases import CASES, sharded
from tests.parallel.shared_ranks import on_ranks

WORDS = 50
ROWS = 20
LENGTH = 8


class Words(nn.Module):
    """An embedding, norms and matrices, of which the course shards all but the norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.norm1 = RMSNorm(16)
        self.linear1 = nn.Linear(16, 32, bias=False)
        self.norm2 = RMSNorm(32)
        self.head = nn.Linear(32, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm2(torch.relu(self.linear1(self.norm1(self.embedding(x))))))


def _fsdp(model: nn.Module, compute_dtype: torch.dtype | None) -> Any:
    """The adapter: norms stay whole on every rank."""
    norms = [module.gain for module in model.modules() if isinstance(module, RMSNorm)]
    return FSDP(model, compute_dtype=compute_dtype, ignored_params=norms)


def _average_norms(model: nn.Module) -> None:
    """The adapter that the course calls after a backward pass."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            all_reduce(module.gain.grad)  # type: ignore[arg-type]


def _check_fsdp(compute_dtype: torch.dtype | None) -> None:
    """Three steps on halves of a batch: 1e-6 in float32, 1e-4 computed in float16 with float32
    kept."""
    torch.manual_seed(0)
    alone = Words()
    dtypes = list[Any]()
    model = _fsdp(copy.deepcopy(alone), compute_dtype)
    optimizers = [optim.SGD(each.parameters(), lr=0.01) for each in (model, alone)]
    tokens = torch.randint(WORDS, (ROWS, LENGTH))
    labels = torch.randint(WORDS, (ROWS,))
    mine = slice(dist.get_rank() * ROWS // 2, (dist.get_rank() + 1) * ROWS // 2)
    model.module.linear1.register_forward_hook(
        lambda module, args, out: dtypes.extend([args[0].dtype, out.dtype])
    )
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        rounded = {
            name: p.to(compute_dtype or torch.float32) for name, p in alone.named_parameters()
        }
        cross_entropy(
            torch.func.functional_call(alone, rounded, (tokens,))[:, -1].float(), labels
        ).backward()
        cross_entropy(model(tokens[mine])[:, -1].float(), labels[mine]).backward()
        _average_norms(model)
        for name, p in model.module.named_parameters():
            assert (p.grad.shape, p.grad.dtype, p.dtype) == (
                p.shape,
                torch.float32,
                torch.float32,
            ), name
            if "norm" in name:  # on all ranks, whole
                gathered = [torch.zeros_like(p.grad) for _ in range(2)]
                dist.all_gather(gathered, p.grad)
                assert torch.equal(*gathered), name
        for optimizer in optimizers:
            optimizer.step()
        tolerance = 1e-6 if compute_dtype is None else 1e-4
        torch.testing.assert_close(
            whole_parameters(model), dict(alone.named_parameters()), atol=tolerance, rtol=1e-4
        )
    assert set(dtypes) == {compute_dtype or torch.float32}
    resident = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    assert resident == sum(p.numel() if p.dim() < 2 else p.numel() // 2 for p in alone.parameters())


def _check_sharded_optimizer() -> None:
    """Steps of AdamW in float32, with gradients that are the same on all ranks."""
    for name in ("tied weights", "a frozen parameter"):
        case = replace(CASES[name], dtype=torch.float32)
        states = []
        for make in (case.optimizer, sharded(case.optimizer)):
            train(case, model := built(case), [0], make)
            states.append(state_of(model))
        assert distance(*states) <= 1e-7, name


@on_ranks(2)
def test_the_course_would_accept_both_behind_its_adapters() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.autograd.set_detect_anomaly(True, check_nan=False):
                _check_fsdp(None)
                _check_fsdp(torch.float16)
            _check_sharded_optimizer()
    finally:  # the ranks serve other tests, too
        torch.use_deterministic_algorithms(False)
