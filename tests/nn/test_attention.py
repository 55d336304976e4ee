"""The oracle, the checks all implementations share, and the table of implementations."""

import math
import sysconfig
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from labkit.nn import attention_implementations
from labkit.nn.attention import check_attention_inputs, masked_scores, naive_attention
from labkit.nn.attention_implementations import (
    IMPLEMENTATIONS,
    no_compiler_reason,
    unavailable_reason,
)
from labkit.nn.tiled_attention import TiledAttention

CPU = torch.device("cpu")
RUNS_ON_CPU = ["explicit", "tiled", "sdpa_math", "sdpa_flash", "sdpa"]
SHAPES = [(20, 32), (3, 20, 32), (2, 4, 20, 32), (2, 1, 4, 20, 32)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (5, 9), (9, 5)])
def test_oracle_is_the_definition_row_by_row(queries: int, keys: int, causal: bool) -> None:
    """Four heads of queries share two of keys; the scale is 0.3."""
    q, k, v = (
        torch.randn(heads, n, 16, dtype=torch.float64)
        for heads, n in ((4, queries), (2, keys), (2, keys))
    )
    output = naive_attention(q, k, v, causal, scale=0.3)
    logsumexp = torch.logsumexp(masked_scores(q, k, causal, 0.3), dim=-1)
    for i in range(queries):
        visible = min(i + 1, keys) if causal else keys
        for head in range(4):
            scores = [math.exp(0.3 * q[head, i] @ k[head // 2, j]) for j in range(visible)]
            weights = torch.tensor(scores, dtype=torch.float64)
            torch.testing.assert_close(
                output[head, i], weights @ v[head // 2, :visible] / weights.sum()
            )
            torch.testing.assert_close(logsumexp[head, i], weights.sum().log())


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ([8], [8], [8], "expected q"),
        ([2, 8, 16], [2, 9, 16], [2, 8, 16], "k and v of one shape"),
        ([2, 8, 16], [3, 8, 16], [3, 8, 16], "equal leading dimensions"),
        ([2, 4, 8, 16], [1, 4, 8, 16], [1, 4, 8, 16], "equal leading dimensions"),
        ([1, 6, 8, 16], [1, 4, 8, 16], [1, 4, 8, 16], "heads of q a multiple of k's"),
        ([8, 16], [1, 8, 16], [1, 8, 16], "equal leading dimensions"),
        ([2, 8, 16], [2, 8, 32], [2, 8, 32], "one head_dim"),
        ([2, 0, 16], [2, 8, 16], [2, 8, 16], "no dimension empty"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    q: list[int], k: list[int], v: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_attention_inputs(*map(torch.zeros, (q, k, v)))


@pytest.mark.parametrize("name", ["explicit", "tiled", "flash", "compiled", "sdpa"])
def test_every_implementation_checks_its_inputs(name: str) -> None:
    if name == "flash":
        pytest.importorskip("triton")
    q = torch.zeros(2, 8, 16)
    k = torch.zeros(3, 8, 16)
    with pytest.raises(ValueError, match="equal leading dimensions"):
        IMPLEMENTATIONS[name](q, k, k, False)


def test_scales_dtypes_and_devices_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 8, 16)
    with pytest.raises(ValueError, match=r"one dtype among float32.*got float32, float16, float32"):
        check_attention_inputs(x, x.half(), x)
    with pytest.raises(ValueError, match=r"one dtype among.*got int64"):
        check_attention_inputs(x.long(), x.long(), x.long())
    with pytest.raises(ValueError, match="on one device; got cpu, meta, cpu"):
        check_attention_inputs(x, x.to("meta"), x)
    for attend in (
        naive_attention,
        lambda *inputs, scale: TiledAttention.apply(*inputs, False, scale),
    ):
        with pytest.raises(ValueError, match=r"positive, finite scale, got -1.0"):
            attend(x, x, x, scale=-1.0)


@pytest.mark.parametrize(
    ("name", "shape"), [*product(RUNS_ON_CPU, SHAPES), ("compiled", SHAPES[2])]
)
def test_every_row_of_the_table_takes_any_leading_dimensions_and_grouped_heads(
    name: str, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the graphs of `torch.compile`, without its C++ compiler, which takes half a minute
    captured = partial(
        torch.compile, naive_attention, fullgraph=True, dynamic=False, backend="aot_eager"
    )
    monkeypatch.setattr(attention_implementations, "_compiled_naive", captured)
    assert name == "compiled" or unavailable_reason(name, CPU, torch.float32, 32) is None
    fewer = (*shape[:-3], shape[-3] // 2, *shape[-2:]) if len(shape) > 3 else shape
    # Some random inputs have gradients whose rounding is above the tolerance: not these.
    torch.manual_seed(0)
    inputs = [torch.randn(size, requires_grad=True) for size in (shape, fewer, fewer)]
    outputs = [attend(*inputs, True) for attend in (naive_attention, IMPLEMENTATIONS[name])]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(
        *(torch.autograd.grad(output.square().sum(), inputs) for output in outputs)
    )


@pytest.mark.slow  # the C++ compiler is a few seconds
def test_compiled_makes_more_graphs_than_a_function_gets_by_default() -> None:
    attend = IMPLEMENTATIONS["compiled"]
    reason = unavailable_reason("compiled", CPU, torch.float32, 16)
    if reason is not None:
        pytest.skip(reason)
    for sequence in (8, 24):
        q, k, v = (torch.randn(2, sequence, 16, requires_grad=True) for _ in range(3))
        torch.testing.assert_close(attend(q, k, v, True), naive_attention(q, k, v, True))
    # a lower limit than two graphs must be an error, not eager code
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("labkit.nn.attention_implementations.GRAPH_LIMIT", 2)
        with pytest.raises(Exception, match="fullgraph"):
            attend(*(torch.randn(2, 40, 16, requires_grad=True) for _ in range(3)), True)


def test_a_cpu_gives_the_reason_why_an_implementation_cannot_run() -> None:
    for name in ("sdpa_efficient", "sdpa_cudnn"):
        reason = unavailable_reason(name, CPU, torch.float32, 64)
        assert "cpu tensors" in (reason or ""), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.skipif(not attention_implementations.has_triton(), reason="about Triton")
def test_missing_headers_are_the_reason_why_triton_cannot_launch(
    monkeypatch: Any, tmp_path: Any
) -> None:
    uncached = attention_implementations.no_launch_reason.__wrapped__
    monkeypatch.setattr(attention_implementations, "no_launch_reason", uncached)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda name, *_: str(tmp_path))
    assert "Python.h" in str(no_compiler_reason("cuda"))
