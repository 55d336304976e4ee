"""labkit behind the adapters of a public course (Stanford CS336, assignment 2): functions of these names and arguments.

What its tests ask of an implementation is asked here, by models and checks of labkit's own: equal to training on the
whole batch in one process, gradients shaped as what a rank has of a parameter, and in its dtype; no warning, under
torch's deterministic algorithms and anomaly detection.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.functional import cross_entropy

from labkit.nn.transformer import RMSNorm
from labkit.parallel.launch import run_ranks
from labkit.parallel.sharding import FSDP, ShardedOptimizer, whole_parameters
from tests.parallel.data_parallel_cases import WIDTH, Tied, frozen

WORDS, ROWS, LENGTH = 50, 20, 8


def get_sharded_optimizer(params: Any, optimizer_cls: type[optim.Optimizer], **kwargs: Any) -> optim.Optimizer:
    return ShardedOptimizer(params, optimizer_cls, **kwargs)


def get_fsdp(module: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    return FSDP(module, compute_dtype=compute_dtype, replicate=(RMSNorm,))  # the course shards matrices only


def fsdp_on_after_backward(fsdp_model: Any, optimizer: optim.Optimizer) -> None:
    """Do nothing: `backward()` has averaged the gradients."""


def fsdp_gather_full_params(fsdp_model: Any) -> dict[str, torch.Tensor]:
    return whole_parameters(fsdp_model)


class Words(nn.Module):
    """An embedding, norms and matrices, of which the course shards all but the norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm1, self.linear1 = nn.Embedding(WORDS, 16), RMSNorm(16), nn.Linear(16, 32, bias=False)
        self.norm2, self.head = RMSNorm(32), nn.Linear(32, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm2(torch.relu(self.linear1(self.norm1(self.embedding(x))))))


class Rounded(nn.Module):
    """A module that computes with parameters rounded to a dtype, and keeps them in float32."""

    def __init__(self, module: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = {name: p.to(self.dtype) for name, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, rounded, (x,))


def _check_fsdp(compute_dtype: torch.dtype | None) -> list[str]:
    """Three steps on halves of a batch: 1e-6 in float32, 1e-4 computed in float16 with float32 kept."""
    wrong, rank = [], dist.get_rank()
    torch.manual_seed(0)
    alone = Words()
    computed = alone if compute_dtype is None else Rounded(alone, compute_dtype)
    model = get_fsdp(copy.deepcopy(alone), compute_dtype=compute_dtype)
    optimizers = [optim.SGD(each.parameters(), lr=0.01) for each in (model, alone)]
    tokens, labels = torch.randint(WORDS, (ROWS, LENGTH)), torch.randint(WORDS, (ROWS,))
    mine = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    dtypes = []
    model.module.linear1.register_forward_hook(lambda module, args, out: dtypes.append((args[0].dtype, out.dtype)))  # type: ignore[union-attr, operator]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        cross_entropy(computed(tokens)[:, -1].float(), labels).backward()
        cross_entropy(model(tokens[mine])[:, -1].float(), labels[mine]).backward()
        fsdp_on_after_backward(model, optimizers[0])
        for name, p in model.module.named_parameters():  # type: ignore[union-attr]
            if p.grad is None or (p.grad.shape, p.grad.dtype, p.dtype) != (p.shape, torch.float32, torch.float32):
                wrong.append(f"gradient of {name}")
            elif "norm" in name:  # on all ranks, whole
                gathered = [torch.zeros_like(p.grad) for _ in range(2)]
                dist.all_gather(gathered, p.grad)
                if not torch.equal(*gathered):
                    wrong.append(f"ranks differ in the gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
        found, tolerance = fsdp_gather_full_params(model), 1e-6 if compute_dtype is None else 1e-4
        wrong += [
            f"{name}, {compute_dtype}"
            for name, p in alone.named_parameters()
            if not torch.allclose(found[name], p, atol=tolerance, rtol=1e-4)
        ]
    expected_dtype = compute_dtype or torch.float32
    if set(dtypes) != {(expected_dtype, expected_dtype)}:
        wrong.append(f"computed in {set(dtypes)}")
    resident = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    expected = sum(p.numel() if p.dim() < 2 else p.numel() // 2 for p in alone.parameters())
    return wrong if resident == expected else [*wrong, f"{resident} elements of {expected}"]


def _check_sharded_optimizer(build: Callable[[], nn.Module]) -> list[str]:
    """Ten steps of AdamW in float32, gradients the same on all ranks, to a relative 1e-7."""
    torch.manual_seed(42)
    model = build().float()
    copied = copy.deepcopy(model)
    settings = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    optimizers = [
        optim.AdamW(model.parameters(), **settings),  # type: ignore[arg-type]
        get_sharded_optimizer(copied.parameters(), optim.AdamW, **settings),
    ]
    for _ in range(10):
        x, y = torch.rand(32, WIDTH), torch.rand(32, WIDTH)
        for each, optimizer in zip((model, copied), optimizers, strict=True):
            optimizer.zero_grad()
            (each(x) - y).square().sum().backward()
            optimizer.step()
    wrong = []
    for (name, expected), found in zip(model.named_parameters(), copied.parameters(), strict=True):
        try:
            np.testing.assert_allclose(found.detach().numpy(), expected.detach().numpy(), rtol=1e-7)
        except AssertionError as error:
            wrong.append(f"{build.__name__}, {name}: {error}")
    return wrong


def _check_all() -> list[str]:
    torch.use_deterministic_algorithms(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            wrong = [text for dtype in (None, torch.float16) for text in _check_fsdp(dtype)]
        return wrong + [text for build in (frozen, Tied) for text in _check_sharded_optimizer(build)]


@pytest.mark.filterwarnings("error")
def test_the_course_would_accept_both_behind_its_adapters(workers_travel_by_value: None) -> None:
    assert run_ranks(_check_all, world_size=2) == [[], []]
