"""Reports of ranks that the kernel killed: its counter says so, and whom it would rather take."""

from __future__ import annotations

import os
import signal
from itertools import count, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from labkit.costs.transformer import SIZES
from labkit.nn.transformer import Transformer
from labkit.parallel.context import ring_attention
from labkit.parallel.launch import PointEnd, RankError, launch, run_ranks
from labkit.parallel.pipeline import Pipeline
from labkit.parallel.ranks import group
from labkit.parallel.ranks.results import is_out_of_memory
from labkit.parallel.ranks.worker import OOM_SCORE
from labkit.parallel.tensor import tensor_parallel
from tests.cases import thinned
from tests.parallel.waiting import is_gone, wait_until

SCORE = Path("/proc/self/oom_score_adj")


def test_a_kill_that_the_kernel_counts_during_the_point_is_for_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "oom_kills", count().__next__)
    ends = list(launch(signal.raise_signal, [signal.SIGKILL, signal.SIGTERM], world_size=1))
    assert [end.status for end in ends if isinstance(end, PointEnd)] == ["oom", "failed"]
    assert [end.reason for end in ends if isinstance(end, PointEnd)] == [
        "rank 0 was killed by SIGKILL: out of memory, by the kernel",
        "rank 0 was killed by SIGTERM",
    ]


def test_an_allocation_that_a_library_of_cuda_could_not_make_is_out_of_memory() -> None:
    assert is_out_of_memory(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    )
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    assert not is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))


def _scores() -> list[int]:
    return [int(SCORE.read_text()), int(Path(f"/proc/{os.getppid()}/oom_score_adj").read_text())]


@pytest.mark.skipif(not SCORE.exists(), reason="Linux has scores for the case that memory runs out")
def test_the_kernel_would_rather_take_a_rank_than_its_parent() -> None:
    parent = int(SCORE.read_text())
    assert run_ranks(_scores, world_size=2) == [[min(1000, parent + OOM_SCORE), parent]] * 2


def _fail_in(part: str, how: str, folder: Path) -> None:
    """Rank 1 fails in the middle of a step, while rank 0 waits for its message."""
    (folder / f"{dist.get_rank()}").write_text(str(os.getpid()))

    def fail(*_: object) -> None:
        if dist.get_rank() == 1 and how == "raises":
            raise ZeroDivisionError
        if dist.get_rank() == 1:
            os._exit(3)

    if part == "tensor":
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        model = tensor_parallel(Transformer(SIZES["nano"], context_length=64))
        model.module.layers[1].register_forward_hook(fail)
        model(tokens, tokens).backward()
    elif part == "pipeline":
        layers = [torch.nn.Linear(8, 8) for _ in range(4)]
        layers[3].register_forward_hook(fail)
        Pipeline(layers, micro_batches=2).step(
            torch.ones(4, 8), torch.ones(4, 8), torch.nn.functional.mse_loss
        )
    else:
        output = ring_attention(*(torch.ones(1, 2, 64, 8, requires_grad=True) for _ in range(3)))
        output.register_hook(fail)
        output.sum().backward()


FAILURES = list(product(("tensor", "pipeline", "context"), ("raises", "dies")))
QUICK = (("tensor", "raises"), ("pipeline", "dies"), ("context", "raises"))


@pytest.mark.parametrize(("part", "how"), thinned(FAILURES, lambda *case: case in QUICK))
def test_a_rank_that_fails_in_a_model_parallel_step_is_named_and_leaves_nothing(
    part: str, how: str, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=r"rank 1"):
        run_ranks(_fail_in, part, how, tmp_path, world_size=2)
    assert wait_until(lambda: all(is_gone(int((tmp_path / rank).read_text())) for rank in "01"))
