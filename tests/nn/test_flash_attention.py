"""The Triton kernels against the float64 oracle: compiled where there is a GPU, else under Triton's interpreter.

The interpreter must be chosen before Triton is imported, and then nothing can be compiled.  So the interpreted tests
are this same file in processes of their own, which `test_passes_under_the_interpreter` waits for.
"""

import re
import subprocess
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from labkit.costs.transformer import TransformerShape
from labkit.nn import flash_attention
from labkit.nn.attention import explicit_attention
from labkit.nn.attention_implementations import IMPLEMENTATIONS
from labkit.nn.flash_attention import FlashAttention, Techniques, flash_backward, flash_forward
from labkit.nn.flash_tiles import Tile
from labkit.nn.training import TrainingStep, gradients
from tests.cases import thinned
from tests.nn.against_oracle import (
    BAD_INPUTS,
    Case,
    assert_saves_one_logsumexp,
    check_against_oracle,
    poisoned_memory,
)

DEVICE = "cpu" if flash_attention.INTERPRETED else "cuda"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
runs_kernels = pytest.mark.skipif(
    not flash_attention.INTERPRETED and not torch.cuda.is_available(),
    reason="needs a CUDA device; test_passes_under_the_interpreter runs it there",
)

# One sequence shows what two would, and each program of the interpreter takes its time: that it is the right sequence
# is for the cases of more dimensions.
one_or_two = partial(Case, leading=(1,) if flash_attention.INTERPRETED else (2,))

# Every value of every property, and the pairs that go wrong together.  Interpreted tiles are 64x32 (32x64 for dK and
# dV): 200 has full, diagonal and ragged blocks.
CASES = [
    *(one_or_two(n, n, 64, causal) for n in (1, 17, 64, 128, 200) for causal in (False, True)),
    *(
        one_or_two(q, k, 32, causal)
        for q, k in ((17, 200), (200, 17), (70, 130), (130, 70))
        for causal in (False, True)
    ),
    *(one_or_two(70, 130, d, True, dtype) for d in (16, 80, 128) for dtype in (F32, F16, BF16)),
    *(one_or_two(130, 70, d, False, dtype) for d in (32, 64) for dtype in (F16, BF16)),
    *(Case(100, 70, 80, causal, dtype, (1, 2), False) for causal in (False, True) for dtype in (F32, F16, BF16)),
    *(Case(70, 100, 48, True, F32, leading) for leading in ((), (2, 2), (2, 1, 2))),
]
# Every value of every property once: dtypes, either side longer, ragged and whole blocks, strides, leading dimensions.
QUICK_CASES = [
    *(one_or_two(n, n, 64, causal) for n, causal in ((1, False), (64, True), (200, False), (200, True))),
    *(one_or_two(q, k, 32, causal) for q, k, causal in ((17, 200, True), (200, 17, False), (130, 70, True))),
    *(one_or_two(70, 130, d, True, dtype) for d, dtype in ((16, F16), (80, F32), (128, BF16))),
    Case(100, 70, 80, False, F16, (1, 2), False),
    Case(100, 70, 80, True, BF16, (1, 2), False),
    Case(70, 100, 48, True, F32, (2, 1, 2)),
]
LONG_CASES = [
    Case(1000, 1000, d, causal, dtype) for d in (64, 128) for causal in (False, True) for dtype in (F32, BF16)
]


@pytest.mark.skipif(flash_attention.INTERPRETED, reason="already interpreted")
def test_passes_under_the_interpreter(interpreted_kernels: subprocess.CompletedProcess[str]) -> None:
    """The cases of this run: every one is a second of interpreted Python."""
    said = interpreted_kernels.stdout
    assert interpreted_kernels.returncode == 0, said[-10_000:] + interpreted_kernels.stderr[-2_000:]
    (passed,) = re.findall(r"(\d+) passed", said)
    assert int(passed) > len(QUICK_CASES), "skipped cases show nothing"


@runs_kernels
@pytest.mark.parametrize("case", thinned(CASES, lambda case: case in QUICK_CASES), ids=str)
def test_matches_the_oracle(case: Case) -> None:
    check_against_oracle(FlashAttention.apply, flash_forward, case, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_matches_the_oracle_at_length(case: Case) -> None:
    check_against_oracle(FlashAttention.apply, flash_forward, case, DEVICE)


@runs_kernels
@pytest.mark.parametrize("tile", [Tile(16, 64, 4, 1), Tile(64, 16, 4, 1), Tile(32, 32, 4, 1)], ids=str)
@pytest.mark.parametrize("causal", thinned([False, True], lambda causal: causal))
def test_any_tile_gives_the_same_result(tile: Tile, causal: bool) -> None:
    q, k, v, grad = one_or_two(100, 90, 32, causal).tensors(DEVICE)
    output, logsumexp = flash_forward(q, k, v, causal)
    gradients = flash_backward(q, k, v, output, logsumexp, grad, causal)
    with poisoned_memory():
        again = flash_forward(q, k, v, causal, tile=tile)
        gradients_again = flash_backward(q, k, v, *again, grad, causal, grad_kv_tile=tile, grad_q_tile=tile)
    for ours, theirs in zip((*again, *gradients_again), (output, logsumexp, *gradients), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)


@runs_kernels
@pytest.mark.parametrize("technique", ["exp2", "skip_hidden", "mask_only_edges"])
@pytest.mark.parametrize("causal", thinned([False, True], lambda causal: causal))
def test_techniques_change_the_time_only(technique: str, causal: bool) -> None:
    q, k, v, _ = one_or_two(100, 130, 32, causal).tensors(DEVICE)
    everything = flash_forward(q, k, v, causal)
    without = flash_forward(q, k, v, causal, techniques=Techniques(**{technique: False}))
    for ours, theirs in zip(without, everything, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)


@runs_kernels
def test_gradients_are_deterministic() -> None:
    case = one_or_two(130, 130, 32, True, F16)
    q, k, v, grad = case.tensors(DEVICE)
    output, logsumexp = flash_forward(q, k, v, True)
    first, second = (flash_backward(q, k, v, output, logsumexp, grad, True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@runs_kernels
def test_large_scores_do_not_overflow() -> None:
    q, k, v = (100 * torch.randn(1, 80, 16, device=DEVICE) for _ in range(3))
    output, logsumexp = flash_forward(q, k, v, True)
    gradients = flash_backward(q, k, v, output, logsumexp, torch.ones_like(q), True)
    assert all(x.isfinite().all() for x in (output, logsumexp, *gradients))


@runs_kernels
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_saves_one_logsumexp(dtype: torch.dtype) -> None:
    assert_saves_one_logsumexp(FlashAttention.apply, DEVICE, dtype)


@runs_kernels
def test_the_table_runs_it() -> None:
    row = IMPLEMENTATIONS["flash"]
    assert row.why_unavailable(torch.device(DEVICE), BF16, 64) is None
    q, k, v, _ = Case(20, 20, 32, True).tensors(DEVICE)
    torch.testing.assert_close(row.attend(q, k, v, True), flash_forward(q, k, v, True)[0])


@pytest.mark.parametrize(("q", "k", "v", "says"), BAD_INPUTS.values(), ids=BAD_INPUTS.keys())
def test_shapes_that_do_not_fit_are_refused(q: list[int], k: list[int], v: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        FlashAttention.apply(torch.zeros(q), torch.zeros(k), torch.zeros(v), False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": torch.float64}, r"one dtype among float32, bfloat16, float16; got float64"),
        ({"size": (2, 8, 8)}, "head dimensions from 16 to 128, not 8"),
        ({"size": (2, 8, 160)}, "head dimensions from 16 to 128, not 160"),
    ],
)
def test_dtypes_and_head_dims_that_do_not_fit_are_refused(options: dict[str, Any], says: str) -> None:
    x = torch.zeros(**({"size": (2, 8, 16)} | options))
    with pytest.raises(ValueError, match=says):
        FlashAttention.apply(x, x, x, False)


@pytest.mark.skipif(flash_attention.INTERPRETED, reason="the interpreter takes the CPU")
def test_a_cpu_is_refused() -> None:
    x = torch.zeros(2, 8, 16)
    with pytest.raises(ValueError, match="need a CUDA GPU"):
        FlashAttention.apply(x, x, x, False)
    assert "need a CUDA GPU" in str(IMPLEMENTATIONS["flash"].why_unavailable(torch.device("cpu"), F32, 64))


@runs_kernels
def test_a_step_of_the_transformer_with_flash_equals_one_with_explicit() -> None:
    """In float32 both round sums of the same terms; the gradients differ by a few units of the largest of each."""
    shape, found = TransformerShape(d_model=64, d_ff=96, n_layers=2, n_heads=2, vocabulary=50), []
    for attend in (explicit_attention, IMPLEMENTATIONS["flash"].attend):
        step = TrainingStep(shape, batch=2, context_length=40, device=DEVICE, attention=attend)
        loss = step.forward().detach()
        step.backward()
        found.append({"loss": loss, **gradients(step.model)})
    expected, got = found
    for name, value in expected.items():
        limit = 64 * torch.finfo(torch.float32).eps * float(value.abs().max())
        torch.testing.assert_close(got[name], value, rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}")
