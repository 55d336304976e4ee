"""The Triton kernels against the float64 oracle: compiled where there is a GPU, else under Triton's
interpreter.

The interpreter must be chosen before Triton is imported, and then nothing can be compiled. So the
interpreted tests are this same file in processes of their own, which
`test_passes_under_the_interpreter` waits for.
"""

import math
import random
import re
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import pytest
import torch

pytest.importorskip("triton")

from labkit.nn import flash_checks
from labkit.nn.attention import naive_attention
from labkit.nn.flash_attention import FlashAttention, run_kernel
from labkit.nn.flash_launch import INTERPRETED
from labkit.nn.flash_tiles import INTERPRETER_TILES, Tile
from labkit.parallel import context_blocks
from labkit.parallel.context import ring_attention, split_sequence
from labkit.parallel.launch import run_ranks
from labkit.parallel.ranks import fork_server
from tests.cases import thinned
from tests.commands import carry_out
from tests.nn.against_oracle import (
    Case,
    assert_output_may_change,
    assert_saves_one_logsumexp,
    check_against_oracle,
)
from tests.parallel.test_context import differentiate

DEVICE = "cpu" if INTERPRETED else "cuda"
F32 = torch.float32
F16 = torch.float16
BF16 = torch.bfloat16
runs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs a CUDA device; test_passes_under_the_interpreter runs it there",
)


def flash_forward(q: Any, k: Any, v: Any, causal: bool, *, scale: float | None) -> tuple[Any, Any]:
    """The output, and the logsumexp in natural logarithms."""
    output, logsumexp = run_kernel("forward", [x.contiguous() for x in (q, k, v)], causal, scale)
    return output, logsumexp * math.log(2)


def _random_cases(number: int) -> list[Case]:
    """Shapes, lengths, head dimensions, masks, groups and scales; interpreted tiles are 64x32: few
    of several."""
    choose = random.Random(0)
    cases = []
    for _ in range(number):
        queries = choose.randint(1, 200)
        keys = choose.randint(1, 200)
        head_dim = choose.choice(
            (16, 32, 64, 128, 256, choose.randint(16, 128), choose.randint(129, 256))
        )
        group = choose.choice((1, 1, 2, 3, 4))
        options: dict[str, Any] = {"group": group, "contiguous": choose.random() < 0.8}
        options["leading"] = (
            choose.choice(((1,), (1,), (2,), (1, 2), (2, 1, 1))) if group < 3 else (1,)
        )
        options["scale"] = choose.choice((None, None, choose.uniform(0.5, 2) * head_dim**-0.5))
        cases.append(
            Case(
                queries,
                keys,
                head_dim,
                choose.random() < 0.5,
                choose.choice((F32, F16, BF16)),
                **options,
            )
        )
    return cases


# Full, diagonal and ragged blocks, either side longer, each dtype, groups, strides, a scale; then
# random ones.
FIXED_CASES = [
    *(
        Case(n, n, 64, causal, leading=(1,))
        for n, causal in ((1, False), (64, True), (130, False), (100, True))
    ),
    *(
        Case(q, k, 32, causal, leading=(1,))
        for q, k, causal in ((17, 100, True), (130, 17, False), (130, 70, True))
    ),
    Case(70, 70, 256, True, BF16, leading=(1,)),
    Case(70, 100, 48, True, F16, leading=()),
    Case(50, 40, 64, False, BF16, leading=(1, 1), group=3, scale=0.3),
    Case(38, 80, 147, False, leading=(1,), group=2, contiguous=False),
]
QUICK_CASES = [FIXED_CASES[place] for place in (4, 5, 8, 9, 10)]
RANDOM_CASES = _random_cases(200)
DESCRIPTOR_CASES = [
    case for case in FIXED_CASES + RANDOM_CASES if case.head_dim % 8 == 0 and case.contiguous
]
TILES = Tile(16, 64, 4, 1), Tile(64, 16, 4, 1), Tile(64, 64, 4, 1)
QUICK_TILES = [("forward", True, TILES[2])]
LONG_CASES = [
    Case(1000, 1000, d, causal, dtype)
    for d in (64, 128, 256)
    for causal in (False, True)
    for dtype in (F32, BF16)
]


# With the slow cases it takes 208 s of CPU, which was 600 s beside other programs. Each case in
# there has the limit of a test.
@pytest.mark.timeout(1800)
@pytest.mark.skipif(INTERPRETED, reason="already interpreted")
def test_passes_under_the_interpreter(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The cases of this run, in one thread: every one is a second of interpreted Python."""
    selected = f"not gpu and ({request.config.option.markexpr or 'not gpu'})"
    command = [
        sys.executable,
        "-m",
        "pytest",
        __file__,
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        selected,
    ]
    # With a fork server of its own: the one that the tests share does not interpret kernels.
    variables = {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "LABKIT_HOME": str(tmp_path),
    }
    interpreted = carry_out(command, Path(__file__).parents[2], variables)
    assert interpreted.returncode == 0, interpreted.stdout[-10_000:] + interpreted.stderr[-2_000:]
    (passed,) = re.findall(r"(\d+) passed", interpreted.stdout)
    assert int(passed) > len(FIXED_CASES), "skipped cases show nothing"


def _ring_errors(dtype_name: str, is_causal: bool, layout: str) -> dict[str, float]:
    """Largest errors of ring attention by the kernels on this rank, relative to float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, 40, 16) for heads in (2, 1, 1, 2)]
    exact = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    inputs = [x.to(getattr(torch, dtype_name)) for x in exact]
    wide = [x.double() for x in inputs]
    expected = differentiate(lambda q, k, v: naive_attention(q, k, v, is_causal), wide)
    split = partial(split_sequence, dim=2, layout=layout)
    with mock.patch.object(context_blocks, "uses_flash", return_value=True):
        ring = partial(ring_attention, is_causal=is_causal, layout=layout)
        actual = differentiate(ring, [split(x) for x in inputs])
    return {
        name: float((x.double() - split(expected[name])).norm() / x.norm())
        for name, x in actual.items()
    }


@pytest.mark.skipif(not INTERPRETED, reason="ranks of this test share no GPU")
@pytest.mark.parametrize(
    ("dtype", "is_causal", "layout"),
    thinned(
        product(("float32", "bfloat16"), (True, False), ("zigzag", "contiguous")),
        # Its blocks are masked, whole and left out.
        lambda *case: case == ("bfloat16", True, "zigzag"),
    ),
)
def test_ring_attention_by_the_kernels(
    dtype: str,
    is_causal: bool,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    # The server of this process serves these ranks alone. They import neither this file nor pytest.
    monkeypatch.setattr(
        fork_server, "PRELOADED", ["labkit.nn.flash_attention", "labkit.parallel.context"]
    )
    for module in (sys.modules[__name__], sys.modules[differentiate.__module__]):
        cloudpickle.register_pickle_by_value(module)
        request.addfinalizer(partial(cloudpickle.unregister_pickle_by_value, module))
    limit = 4 * torch.finfo(getattr(torch, dtype)).eps
    for errors in run_ranks(_ring_errors, dtype, is_causal, layout, world_size=2):
        assert errors.keys() == {"output", "q", "k", "v"}
        assert max(errors.values()) <= limit, errors


@runs_kernels
@pytest.mark.parametrize(
    "case", thinned(FIXED_CASES + RANDOM_CASES, lambda case: case in QUICK_CASES), ids=str
)
def test_matches_the_oracle(case: Case) -> None:
    check_against_oracle(FlashAttention.apply, flash_forward, case, DEVICE)


@pytest.mark.skipif(
    not INTERPRETED, reason="on a GPU the tile is compared with float64 before its first use"
)
@pytest.mark.parametrize(
    "case", thinned(DESCRIPTOR_CASES, lambda case: case == FIXED_CASES[9]), ids=str
)
def test_specialized_warps_with_descriptors_match_the_oracle(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INTERPRETER_TILES, "forward", Tile(64, 32, 4, 1, specialize=2))
    check_against_oracle(FlashAttention.apply, flash_forward, case, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_matches_the_oracle_at_length(case: Case) -> None:
    check_against_oracle(FlashAttention.apply, flash_forward, case, DEVICE)


@runs_kernels
@pytest.mark.parametrize(
    ("name", "causal", "tile"),
    thinned(product(INTERPRETER_TILES, (True, False), TILES), lambda *case: case in QUICK_TILES),
)
def test_any_tile_agrees_with_float64(name: str, causal: bool, tile: Tile) -> None:
    case = flash_checks.Case(name, 32, 2, F32, causal, torch.device(DEVICE))
    assert flash_checks.tile_fault(case, tile) is None


@pytest.mark.parametrize("name", INTERPRETER_TILES)
def test_a_tile_that_is_wrong_or_does_not_compile_is_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first use; the launches are stand-ins."""
    good = Tile(64, 64, 4, 2)
    wrong = Tile(64, 32, 4, 2)
    broken = Tile(32, 32, 4, 2)
    case = flash_checks.Case(name, 32, 2, F32, True, torch.device("cpu"))
    exact = flash_checks._probe(case._replace(kernel=""))[1][name]

    def launch(name, inputs, causal, scale, tiles):
        if tiles == (broken,):
            raise RuntimeError("PassManager::run failed\nand more")
        results = [result.float() for result in exact]
        if tiles == (wrong,):
            results[-1].view(-1)[-16:] += 10
        return results

    monkeypatch.setattr(flash_checks, "launch", launch)
    monkeypatch.setattr(flash_checks, "delta", lambda output, grad: output.sum(-1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    tiles = [good, wrong, broken]
    monkeypatch.setattr(flash_checks, "tiles_for", lambda *_, **__: tiles)
    choose = flash_checks.usable_tiles.__wrapped__
    with pytest.warns(UserWarning, match="left out") as warned:
        assert choose(case) == (good,)
    assert "relative error" in str(warned[0].message)
    assert str(warned[1].message).endswith("PassManager::run failed")
    tiles.remove(good)
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(RuntimeError, match="no tile can be used: relative error"),
    ):
        choose(case)


@runs_kernels
def test_large_scores_do_not_overflow() -> None:
    q, k, v = (100 * torch.randn(1, 80, 16, device=DEVICE).requires_grad_() for _ in range(3))
    output = FlashAttention.apply(q, k, v, True)
    gradients = torch.autograd.grad(output.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (output, *gradients))


@runs_kernels
@pytest.mark.parametrize("dtype", thinned([F32, F16, BF16], lambda dtype: dtype == F16))
def test_saves_one_logsumexp(dtype: torch.dtype) -> None:
    assert_saves_one_logsumexp(FlashAttention.apply, DEVICE, dtype)


@runs_kernels
def test_the_output_may_be_changed_in_place() -> None:
    assert_output_may_change(FlashAttention.apply, DEVICE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float64}, r"one dtype among float32, bfloat16, float16; got float64"),
        ({"size": (2, 8, 8)}, "head dimensions from 16 to 256, not 8"),
        ({"size": (2, 8, 257)}, "head dimensions from 16 to 256, not 257"),
        pytest.param(
            {}, "need a CUDA GPU", marks=pytest.mark.skipif(INTERPRETED, reason="it takes the CPU")
        ),
    ],
)
def test_dtypes_head_dims_and_devices_that_do_not_fit_are_refused(
    options: dict[str, Any], message: str
) -> None:
    x = torch.zeros(**({"size": (2, 8, 16)} | options))
    with pytest.raises(ValueError, match=message):
        FlashAttention.apply(x, x, x, False)
