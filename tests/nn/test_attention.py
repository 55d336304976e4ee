"""The oracle, the checks all implementations share, and the table of implementations."""

import math
import subprocess
import sys

import pytest
import torch

from labkit.nn.attention import check_attention_inputs, explicit_attention, masked_scores
from labkit.nn.attention_implementations import IMPLEMENTATIONS, attention_named
from tests.nn.against_oracle import BAD_INPUTS

CPU = torch.device("cpu")
RUNS_ON_CPU = ["explicit", "tiled", "sdpa_math", "sdpa_flash", "sdpa"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (5, 9), (9, 5)])
def test_oracle_is_the_definition_row_by_row(queries: int, keys: int, causal: bool) -> None:
    q, k, v = (torch.randn(2, n, 16, dtype=torch.float64) for n in (queries, keys, keys))
    output, logsumexp = explicit_attention(q, k, v, causal), torch.logsumexp(masked_scores(q, k, causal), dim=-1)
    for i in range(queries):
        seen = min(i + 1, keys) if causal else keys
        for b in range(2):
            weights = torch.tensor([math.exp(q[b, i] @ k[b, j] / 4.0) for j in range(seen)], dtype=torch.float64)
            torch.testing.assert_close(output[b, i], weights @ v[b, :seen] / weights.sum())
            torch.testing.assert_close(logsumexp[b, i], weights.sum().log())


def test_oracle_masks_as_scaled_dot_product_attention_does() -> None:
    for queries, keys in [(6, 6), (4, 9), (9, 4)]:
        q, k, v = (torch.randn(1, 2, n, 16, dtype=torch.float64) for n in (queries, keys, keys))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(explicit_attention(q, k, v, True), expected)


@pytest.mark.parametrize(("q", "k", "v", "says"), BAD_INPUTS.values(), ids=BAD_INPUTS.keys())
@pytest.mark.parametrize("name", ["explicit", "compiled", "tiled", "sdpa"])
def test_shapes_that_do_not_fit_are_refused(name: str, q: list[int], k: list[int], v: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        attention_named(name).attend(torch.zeros(q), torch.zeros(k), torch.zeros(v), False)


def test_dtypes_and_devices_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 8, 16)
    with pytest.raises(ValueError, match=r"one dtype among float32.*got float32, float16, float32"):
        check_attention_inputs(x, x.half(), x)
    with pytest.raises(ValueError, match=r"one dtype among.*got int64"):
        check_attention_inputs(x.long(), x.long(), x.long())
    with pytest.raises(ValueError, match="on one device; got cpu, meta, cpu"):
        check_attention_inputs(x, x.to("meta"), x)


def test_a_wrong_name_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"no attention named 'flsh'; there are explicit, compiled, tiled, flash"):
        attention_named("flsh")


@pytest.mark.parametrize("name", RUNS_ON_CPU)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)], ids=lambda x: f"{len(x) + 2}D")
def test_every_row_of_the_table_takes_any_leading_dimensions(name: str, leading: tuple[int, ...]) -> None:
    row = IMPLEMENTATIONS[name]
    assert row.name == name
    assert row.why_unavailable(CPU, torch.float32, 32) is None
    q, k, v = (torch.randn(*leading, n, 32, requires_grad=True) for n in (20, 20, 20))
    output = row.attend(q, k, v, True)
    torch.testing.assert_close(output, explicit_attention(q, k, v, True))
    output.sum().backward()
    assert q.grad is not None


@pytest.mark.slow  # the C++ compiler is a few seconds
def test_compiled_makes_more_graphs_than_a_function_gets_by_default() -> None:
    row = IMPLEMENTATIONS["compiled"]
    reason = row.why_unavailable(CPU, torch.float32, 16)
    if reason is not None:
        pytest.skip(reason)
    for sequence in (8, 24):
        q, k, v = (torch.randn(2, sequence, 16, requires_grad=True) for _ in range(3))
        torch.testing.assert_close(row.attend(q, k, v, True), explicit_attention(q, k, v, True))
    with pytest.MonkeyPatch.context() as patch:  # a lower limit than two graphs must be an error, not eager code
        patch.setattr("labkit.nn.attention_implementations.GRAPH_LIMIT", 2)
        with pytest.raises(Exception, match="fullgraph"):
            row.attend(*(torch.randn(2, 40, 16, requires_grad=True) for _ in range(3)), True)


def test_what_a_cpu_cannot_run_says_why() -> None:
    for name in ("sdpa_efficient", "sdpa_cudnn"):
        reason = IMPLEMENTATIONS[name].why_unavailable(CPU, torch.float32, 64)
        assert reason, name
    assert "int64" in str(IMPLEMENTATIONS["explicit"].why_unavailable(CPU, torch.int64, 64))


def test_the_table_imports_neither_triton_nor_the_compiler() -> None:
    code = "import sys, labkit.nn.attention; print([m for m in ('triton', 'torch._dynamo') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told.strip() == "[]"
