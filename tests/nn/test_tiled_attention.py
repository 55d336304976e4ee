"""Tiled attention against the float64 oracle, its memory, and which tiles it visits."""

import pytest
import torch

from labkit.nn import tiled_attention
from labkit.nn.attention import naive_attention
from labkit.nn.tiled_attention import TiledAttention, tiled_forward
from tests.cases import thinned
from tests.nn.against_oracle import (
    Case,
    assert_output_may_change,
    assert_saves_one_logsumexp,
    check_against_oracle,
)

F32 = torch.float32
F16 = torch.float16
BF16 = torch.bfloat16

# Every value of every property, and the pairs that go wrong together: causal with each length, with
# lengths that differ either way, with each dtype; head dims with each dtype.  On a CPU a tile is
# 512 wide for few heads: 1000 has full, diagonal and ragged tiles.
CASES = [
    *(Case(n, n, 64, causal) for n in (1, 17, 64, 128, 200, 1000) for causal in (False, True)),
    *(
        Case(q, k, 32, causal)
        for q, k in ((17, 200), (200, 17), (1, 700), (700, 1))
        for causal in (False, True)
    ),
    *(Case(600, 1100, d, True, dtype) for d in (16, 80, 128, 256) for dtype in (F32, F16, BF16)),
    *(Case(1100, 600, d, False, dtype) for d in (32, 64) for dtype in (F16, BF16)),
    *(
        Case(130, 70, 80, causal, dtype, (2, 3), False)
        for causal in (False, True)
        for dtype in (F32, F16, BF16)
    ),
    *(Case(70, 130, 64, True, F32, leading) for leading in ((), (2, 3), (2, 1, 2))),
    *(
        Case(700, 600, 32, causal, dtype, group=4, scale=0.3)
        for causal in (False, True)
        for dtype in (F32, BF16)
    ),
]
# Of lengths with several tiles, each head dimension and each dtype once.
QUICK_CASES = [
    *(case for case in CASES if max(case.queries, case.keys) < 1100),
    *(Case(600, 1100, d, True, dtype) for d, dtype in ((16, F16), (80, F32), (128, BF16))),
    Case(1100, 600, 32, False, BF16),
    Case(1100, 600, 64, False, F16),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", thinned(CASES, lambda case: case in QUICK_CASES), ids=str)
def test_matches_the_oracle(case: Case, device: str) -> None:
    check_against_oracle(TiledAttention.apply, tiled_forward, case, device)


@pytest.mark.parametrize("side", [16, 32])
def test_matches_the_oracle_with_many_small_tiles(
    side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled_attention, "tile_side", lambda q: side)
    for queries, keys in ((100, 100), (96, 160), (160, 96)):
        for causal in (False, True):
            check_against_oracle(
                TiledAttention.apply, tiled_forward, Case(queries, keys, 16, causal, group=2), "cpu"
            )


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_equal_finite_differences(causal: bool) -> None:
    q, k, v = (torch.randn(2, n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7))
    assert torch.autograd.gradcheck(lambda *x: TiledAttention.apply(*x, causal), (q, k, v))


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (100 * torch.randn(1, 80, 16) for _ in range(3))
    output, logsumexp = tiled_forward(q, k, v, True)
    assert output.isfinite().all()
    assert logsumexp.isfinite().all()


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_saves_one_logsumexp(dtype: torch.dtype) -> None:
    assert_saves_one_logsumexp(TiledAttention.apply, "cpu", dtype)


def test_the_output_may_be_changed_in_place() -> None:
    assert_output_may_change(TiledAttention.apply, "cpu")


@pytest.mark.slow
def test_torch_compile_makes_one_graph_even_of_changes_in_place() -> None:
    compiled = torch.compile(
        lambda *x: TiledAttention.apply(*x).mul_(2), backend="aot_eager", fullgraph=True
    )
    inputs = [torch.randn(1, 40, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    output = compiled(*inputs, True)
    expected = 2 * naive_attention(*inputs, True)
    torch.testing.assert_close(output, expected)
    gradients = [torch.autograd.grad(each.square().sum(), inputs) for each in (output, expected)]
    torch.testing.assert_close(*gradients)
    with torch.inference_mode():
        torch.testing.assert_close(TiledAttention.apply(*inputs, True), expected / 2)


def test_hidden_tiles_are_not_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    visited = []
    monkeypatch.setattr(tiled_attention, "tile_side", lambda q: 16)
    monkeypatch.setattr(
        tiled_attention,
        "_hide_future",
        lambda _, rows, columns: visited.append((rows.start, columns.start)),
    )
    q, k, v = (torch.randn(1, 64, 16, requires_grad=True) for _ in range(3))
    output = TiledAttention.apply(q, k, v, True)
    lower_triangle = [(i, j) for i in range(0, 64, 16) for j in range(0, i + 1, 16)]
    assert sorted(visited) == lower_triangle
    visited.clear()
    output.sum().backward()
    assert sorted(visited) == lower_triangle


def test_a_batch_does_not_change_the_memory_of_its_tiles() -> None:
    for heads in (1, 8, 48, 96):
        side = tiled_attention.tile_side(torch.empty(heads, 1, 1))
        assert 64 <= side <= 512
        assert heads * side**2 <= 2**19
