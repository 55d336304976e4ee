"""The lab on one's own training: setups as users write them, changes, and lines."""

import math
import time
from collections import UserDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from labkit.bench.statistics import NO_DIFFERENCE_SHOWN
from labkit.lab.metric import Results
from labkit.studies.shared.alternatives import threads
from labkit.studies.shared.checks import TOLERANCES
from labkit.studies.your_training.arguments import find_batches, measure_values
from labkit.studies.your_training.attention import AttentionShape, find_attention
from labkit.studies.your_training.changes import CHANGES, apply
from labkit.studies.your_training.check import are_equal, compare_results
from labkit.studies.your_training.gains import describe_effects, describe_gain, sdpa_gains
from labkit.studies.your_training.lab import LAB
from labkit.studies.your_training.lines import line_rows
from labkit.studies.your_training.loop import Loop
from labkit.studies.your_training.memory import memory_rows
from labkit.studies.your_training.setup import SetupError, build, check_first_step, load_setup
from labkit.studies.your_training.worker import (
    TOGETHER,
    YOURS,
    YourTrainingPoint,
    compare,
    measure,
)


@pytest.fixture(autouse=True)
def _sampled_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.studies.your_training.worker.LINES_S", 0.1)


FOLDER = Path(__file__).parent / "setups"
# What times steps in turns.
CLOCK = "labkit.studies.shared.alternatives.time_parts_interleaved"
RIGHT = (
    *("gpt", "returns_an_object", "images", "lstm", "tied_and_frozen", "dropout", "experts"),
    *("dictionaries", "script"),
)


def rows_of(name: str, **values: Any) -> list[dict[str, Any]]:
    options: dict[str, Any] = {"warmup": 1, "repeats": 6, "rounds_s": 0.1}
    point = YourTrainingPoint(file=f"{FOLDER / name}.py", **options | values)
    return list(measure(point))


@pytest.mark.parametrize("name", RIGHT)
def test_a_step_has_its_parts_and_their_sum(name: str) -> None:
    rows = rows_of(name, sweep="step")
    assert not [row for row in rows if row.get("status", "ok") != "ok"]
    seconds = {row["part"]: row["seconds"] for row in rows if row["kind"] == "part"}
    assert list(seconds) == ["input", "forward", "backward", "optimizer", "step"]
    parts = zip(*(seconds[part] for part in list(seconds)[:4]), strict=True)
    assert seconds["step"] == [pytest.approx(sum(each)) for each in parts]


class Numbered:
    """Batches with their number in the epoch."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((1,), float(number)) for number in range(3))


def test_each_timed_step_takes_the_next_batch_as_a_plain_loop_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for after in ("line_rows", "memory_rows"):
        monkeypatch.setattr(f"labkit.studies.your_training.worker.{after}", lambda *_: [])
    seen = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(int(batch))
        return model(batch).sum()

    point = YourTrainingPoint(sweep="step", warmup=1, repeats=6)
    rows = list(measure(point, lambda: (nn.Linear(1, 1), Numbered(), loss)))
    timed = [row for row in rows if row["kind"] == "part"]
    assert [len(row["seconds"]) for row in timed] == [6] * 5
    # Before: the setup's check, and the count of FLOPs.
    assert seen == [0, 0, *[0, 1, 2], *[0, 1, 2], 0]


def test_parameters_without_a_gradient_are_named() -> None:
    _, without = check_first_step(build(load_setup(f"{FOLDER / 'experts'}.py")))
    assert without == ["experts.2.weight", "experts.2.bias"]


FEW = ("gpt", "images", "dropout")  # attention, batch norm and a loader, random numbers
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in RIGHT if name not in FEW]


FAST_CHANGES = tuple(one for one in CHANGES if one != "torch.compile")


@cache
def rows_of_changes(name: str) -> list[dict[str, Any]]:
    return rows_of(name, sweep="changes", changes=FAST_CHANGES)


# Changes that need something of a setup; a fused optimizer and autocast are for any.
POSSIBLE = {
    "images": {"loader workers", "channels_last"},
    "dictionaries": {"loader workers"},
}


@pytest.mark.parametrize("name", [*FEW, *OTHERS])
def test_every_change_is_right_or_refused(name: str) -> None:
    rows = [row for row in rows_of_changes(name) if "change" in row]
    assert {row["change"] for row in rows} - {TOGETHER, YOURS} == set(FAST_CHANGES)
    assert {row["status"] for row in rows} <= {"ok", "refused"}
    right = {row["change"] for row in rows if row["status"] == "ok"}
    assert right >= {"fused optimizer", "autocast to bfloat16"} | POSSIBLE.get(name, set())
    timed = [row["change"] for row in rows if "seconds" in row]
    assert timed[::2] == [YOURS] * (len(timed) // 2)
    assert set(timed[1::2]) == right - {YOURS}


def test_lines_memory_and_flops_of_a_step_are_those_of_the_file() -> None:
    rows = rows_of("gpt", sweep="step")
    (found,) = [row for row in rows if row["kind"] == "found"]
    # Forward, and twice that backward: qkv, scores, mixing, output, head of 2 x 16 tokens.
    macs = 32 * (32 * 96 + 2 * 16 * 32 + 32 * 32 + 32 * 64)
    assert found["flops"] == 6 * macs
    holders = {row["holder"]: row["held_bytes"] for row in rows if row["kind"] == "memory"}
    assert holders["parameters"] == 4 * found["n_parameters"]
    assert holders["optimizer states"] >= 8 * found["n_parameters"]
    assert [name for name in holders if name.startswith("gpt.py:")]
    lines = [row for row in rows if row["kind"] == "line"]
    assert sum(row["backward_share"] for row in lines) <= 1 + 1e-9


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_memory_that_a_step_finds_counts_once_and_its_batch_never(kind: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"][:, :-1]).square().mean()

    batch = kind(x=torch.ones(2, 257))
    loop = Loop(build(lambda: (nn.Linear(256, 256, bias=False), [batch], loss)))
    # In a thread, below which no line of this file stands: it would hold the update's tensors.
    with loop.turn(), ThreadPoolExecutor() as pool:
        for _ in range(2):  # the first step allocates the states, a later one finds them
            rows = pool.submit(list, memory_rows(loop)).result()
            held = {row["holder"]: row["held_bytes"] for row in rows}
            size = 4 * 256 * 256
            assert (held["parameters"], held["gradients"]) == (size, size)
            assert held["optimizer states"] == 2 * size + 4  # and the number of the step
            assert {*held} == {
                "parameters",
                "gradients",
                "optimizer states",
                "the optimizer's step",
            }


def test_a_notebooks_function_is_measured_and_without_one_it_says_what_is_missing() -> None:
    point = YourTrainingPoint(sweep="step", warmup=0, repeats=1)
    assert {row["kind"] for row in measure(point, setup=linear)} >= {"found", "part", "memory"}
    (row,) = measure(point)
    assert row["status"] == "refused"


def test_two_optimizers_are_refused() -> None:
    (row,) = rows_of("gan", sweep="step")
    assert row["status"] == "refused"
    assert "one torch optimizer" in row["reason"]
    answers = LAB.answers(Results(pd.DataFrame([row])))
    assert {answer.reason for answer in answers.values()} == {row["reason"]}


def linear(batches: Any = None, loss: Any = None, **more: Any) -> tuple[Any, ...]:
    batches = [torch.randn(4, 8)] if batches is None else batches
    loss = loss or (lambda model, batch: model(batch).square().mean())
    return nn.Linear(8, 8), batches, loss, *more.values()


def _raise(*_: Any) -> Any:
    raise RuntimeError("no such file")


SGD = torch.optim.SGD(nn.Linear(2, 2).parameters())
WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (lambda: None, "expected the setup to return"),
    "no model": (lambda: (nn.Linear, [1], max), "expected the model to be an nn.Module"),
    "frozen": (lambda: (nn.Linear(2, 2).requires_grad_(False), [1], max), "parameter to train"),
    "a tensor for batches": (lambda: linear(torch.randn(4, 8)), "expected batches to be"),
    "no batches": (lambda: linear([]), "there are none"),
    "a loss of rows": (lambda: linear(loss=lambda model, x: model(x).mean(1)), "one number"),
    "a float": (lambda: linear(loss=lambda model, x: model(x).mean().item()), "one number"),
    "detached": (lambda: linear(loss=lambda model, x: model(x).mean().detach()), "depends on"),
    "NaN": (lambda: linear(loss=lambda model, x: model(x).mean() * float("nan")), "finite"),
    "a foreign optimizer": (
        lambda: linear(optimizer=SGD),
        "optimizer of the model's parameters",
    ),
    "two optimizers": (lambda: linear(generator=SGD, critic=SGD), "a training with several"),
    "a list of them": (lambda: linear(optimizers=[SGD, SGD]), "a training with several"),
    "a scheduler": (lambda: linear(optimizer=SGD, scheduler=max), "got a tuple of 5"),
    "raises": (_raise, "no such file"),
    "the loss raises": (lambda: linear(loss=_raise), "no such file"),
    "needs an argument": (lambda batch: linear(), "argument: 'batch'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setup_is_one_line(case: str) -> None:
    function, message = WRONG[case]
    with pytest.raises(SetupError, match=message) as error:
        check_first_step(build(function))
    assert "\n" not in str(error.value)


def test_an_error_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken_setup.py"
    path.write_text("def setup():\n    return 1 / 0\n")
    with pytest.raises(SetupError, match=r"^broken_setup\.py:2: ZeroDivisionError"):
        build(load_setup(str(path)))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("missing.py:setup", "no file"),
        (f"{FOLDER / 'gpt'}.py:missing", "its functions are loss, setup"),
    ],
)
def test_a_missing_setup_is_named(target: str, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        load_setup(target)


def test_a_generator_that_ran_out_is_named() -> None:
    training = build(lambda: linear(iter([torch.randn(4, 8)])))
    batches = training.forever()
    next(batches)
    with pytest.raises(SetupError, match="return a list or a DataLoader"):
        next(batches)


def attention_in(function: Any) -> list[AttentionShape]:
    loop = Loop(build(function))
    with loop.turn():
        return [*find_attention(loop)]


def test_attention_by_hand_is_found_and_timed_against_sdpa() -> None:
    (found,) = attention_in(load_setup(f"{FOLDER / 'gpt'}.py"))
    assert (found.leading, found.queries, found.keys, found.head_dim) == ((2, 4), 16, 16, 8)
    assert found.mask == "causal"
    assert found.line.startswith("gpt.py:")
    rows = [row for row in rows_of("gpt", sweep="changes") if row.get("kind") == "attention"]
    assert [(row["attention"], row["status"]) for row in rows] == [
        ("by hand", "ok"),
        ("SDPA", "ok"),
    ]
    assert len(rows[0]["seconds"]) == len(rows[1]["seconds"])


def attend(x: torch.Tensor, *, scale: float, mask: torch.Tensor | None = None) -> torch.Tensor:
    scores = x @ x.mT * scale
    if mask is not None:
        scores = scores.masked_fill(mask, -1e9)
    return scores.softmax(-1) @ x


def sdpa(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]


def test_attention_with_a_bias_is_not_compared_with_one_that_has_none() -> None:
    slopes = torch.arange(32.0) / 32

    def biased(x: torch.Tensor) -> torch.Tensor:
        return ((x @ x.mT / 4).masked_fill(PADDING, -1e9) + slopes).softmax(-1) @ x

    def masked(x: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(torch.where(PADDING, -1e9, 0.0), x, x.mT).softmax(-1) @ x

    def rows_with(attend: Any, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
        batches = [torch.randn(4, 32, 16, dtype=dtype)]
        loss = lambda model, x: attend(model(x)).mean()  # noqa: E731
        point = YourTrainingPoint(sweep="changes", warmup=0, repeats=1)
        return [*measure(point, lambda: (nn.Linear(16, 16, dtype=dtype), batches, loss))]

    for dtype in (torch.float32, torch.float64):
        rows = rows_with(partial(attend, scale=0.2), dtype)
        assert [row["status"] for row in rows] == ["ok", "ok"]
    assert [row["status"] for row in rows_with(masked)] == ["ok", "ok"]
    (refused,) = rows_with(biased)
    assert refused["status"] == "refused"
    (row,) = sdpa_gains(Results(pd.DataFrame([refused]))).to_dict("records")
    assert row["reason"] == refused["reason"]


PADDING = torch.arange(32) > 20
ATTENTION: dict[str, tuple[Any, list[str]]] = {
    "unmasked": (lambda x: attend(x, scale=0.2), ["none"]),
    "padding": (lambda x: attend(x, scale=0.2, mask=PADDING), ["other"]),
    "dropout": (lambda x: nn.functional.dropout((x @ x.mT).softmax(-1)) @ x, ["none"]),
    "sdpa": (sdpa, []),
    "a softmax over other dimensions": (lambda x: (x @ x.mT).softmax(-2) @ x, []),
    "a softmax of no product": (lambda x: x.softmax(-1) @ x.mT, []),
    "a softmax of a single number": (
        lambda x: torch.bmm(x[:1, :1], x[:1, :1].mT).squeeze().softmax(0),
        [],
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_only_attention_is_taken_for_it(name: str) -> None:
    function, masks = ATTENTION[name]
    batches = [torch.randn(4, 32, 16)]
    loss = lambda model, x: function(model(x)).square().mean()  # noqa: E731
    found = attention_in(lambda: (nn.Linear(16, 16), batches, loss))
    assert [one.mask for one in found] == masks


def test_wrong_attention_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "labkit.studies.your_training.attention"
    monkeypatch.setattr(f"{module}.scaled_dot_product_attention", lambda q, k, v, **_: q + k + v)
    rows = [row for row in rows_of("gpt", sweep="changes") if row.get("kind") == "attention"]
    assert [row["status"] for row in rows] == ["ok", "wrong"]
    assert "seconds" not in rows[1]


def deep() -> Any:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    model = nn.Sequential(*[block() for _ in range(8)])
    return model, [torch.randn(256, 16)], lambda model, x: model(x).square().mean()


def test_checkpointing_is_tried_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    point = YourTrainingPoint(sweep="changes", warmup=0, repeats=2, changes=("checkpointing",))
    (refused,) = measure(point, deep)
    assert refused["status"] == "refused"
    module = "labkit.studies.your_training.changes"
    monkeypatch.setattr(f"{module}.available_bytes", lambda device: 1e6)
    _, row = measure(point, deep)
    assert row["status"] == "ok"
    assert row["peak_ratio"] < 0.7


def test_a_change_of_results_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def scale_loss(model: Any, batches: Any, loss: Any, optimizer: Any) -> Any:
        return model, batches, lambda model, batch: 1.1 * loss(model, batch), optimizer

    change = CHANGES["channels_last"]
    wrong = replace(change, make=scale_loss, refusal=lambda training: None)
    monkeypatch.setitem(CHANGES, "channels_last", wrong)  # type: ignore[arg-type]
    rows = rows_of("lstm", sweep="changes", changes=("channels_last",))
    assert rows[-1]["status"] == "wrong"


@pytest.mark.parametrize(("scale", "status"), [(1.0, "ok"), (3.0, "wrong")])
def test_a_right_change_may_differ_as_much_as_rounding_makes_yours_differ(
    scale: float, status: str
) -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 64)

    def loop_with(order: list[int], scale: float) -> Loop:
        def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            # The same sum in another order, of which the sine makes another number.
            sums = nn.functional.linear(x[:, order], model.weight[:, order])
            return scale * (1e4 * sums).sin().mean()

        return Loop(build(lambda: (nn.Linear(64, 4, bias=False), [batch], loss)))

    yours = loop_with(list(range(64)), 1.0)
    changed = loop_with(list(range(63, -1, -1)), scale)
    columns = compare_results(yours, changed, precision="float32", seed=0)
    assert columns["error"] > TOLERANCES["float32"]
    assert columns["status"] == status


def test_a_change_that_saves_memory_and_changes_results_says_both() -> None:
    row = {"is_exact": False, "gradient_error": 0.004, "less_memory_percent": 30.0}
    said = describe_effects(row)
    assert "0.4%" in said
    assert "30% less memory" in said
    assert describe_effects({"is_exact": True, "less_memory_percent": math.nan}) == ""


def test_a_change_that_takes_longer_takes_more_and_not_negatively_less() -> None:
    row = {"less_percent": -13.2, "less_low_percent": -31.0, "less_high_percent": 1.0}
    assert describe_gain(row, is_busy=True) == "13% more [-1, 31]"


@pytest.mark.parametrize(
    ("less", "low", "high", "reason"),
    [
        (11.0, 3.0, 27.0, "2.5% over all comparisons"),
        (-11.0, -27.0, -3.0, "2.5% over all comparisons"),
        (2.0, 1.0, 3.0, "3% or more"),
        (4.0, -1.0, 9.0, ""),
    ],
)
def test_an_interval_without_0_says_why_no_difference_is_shown(
    less: float, low: float, high: float, reason: str
) -> None:
    row = {"less_percent": less, "less_low_percent": low, "less_high_percent": high}
    said = describe_gain(row | {"verdict": NO_DIFFERENCE_SHOWN}).partition(":")[0]
    assert said.removeprefix(NO_DIFFERENCE_SHOWN).endswith(reason)
    assert bool(reason) == (said != NO_DIFFERENCE_SHOWN)


def of_last_layer_only(loss: Any) -> Any:
    """Return a training whose optimizer has no other layer, though all have gradients."""

    def setup() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        return model, [torch.randn(4, 8)], loss, torch.optim.SGD(model[2].parameters(), lr=0.1)

    return build(setup)


def test_a_wrong_change_is_found_if_the_optimizer_has_one_layer_only() -> None:
    yours, changed = (
        Loop(of_last_layer_only(lambda model, batch, n=n: model(batch[:n]).square().mean()))
        for n in (4, 2)
    )
    columns = compare_results(yours, changed, precision="float32", seed=0)
    assert columns["status"] == "wrong"


def rough(factor: float = 1.0) -> Any:
    """Return a loop whose gradients in bfloat16 are rounding for the most part."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(20)]
    batches = [torch.randn(16, 64)]
    loss = lambda model, batch: factor * model(batch).square().mean()  # noqa: E731
    return Loop(build(lambda: (nn.Sequential(*layers), batches, loss)))


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_a_wrong_change_does_not_pass_where_rounding_would_hide_it(factor: float) -> None:
    columns = compare_results(rough(), rough(factor), precision="bfloat16", seed=0)
    assert columns["status"] in ("wrong", "refused")
    assert columns["reason"]


class Masked(nn.Module):
    """Makes a buffer in its first pass, and counts its passes in one that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(8))
        self.passes += 1
        return self.linear(x) * self.mask * self.passes


def test_buffers_are_restored_and_new_ones_do_no_harm() -> None:
    _, *others = linear([torch.randn(4, 8)])
    loops = [Loop(build(lambda: (Masked(), *others))) for _ in range(2)]
    loops[1].training.model.load_state_dict(loops[0].training.model.state_dict(), strict=False)
    columns = compare_results(*loops, precision="float32", seed=0)
    assert (columns["status"], columns["is_exact"]) == ("ok", True)


def test_a_batch_with_missing_values_is_equal_to_itself() -> None:
    batch = {"x": torch.tensor([1.0, math.nan]), "name": "a"}
    assert are_equal(batch, {"x": torch.tensor([1.0, math.nan]), "name": "b"})
    for kind in (dict, UserDict):
        assert not are_equal(kind(batch), kind(x=torch.tensor([1.0, 2.0]), name="a"))


def test_a_model_with_whole_numbers_among_its_parameters_is_compared() -> None:
    def setup() -> Any:
        model, *others = linear()
        model.codes = nn.Parameter(torch.arange(3), requires_grad=False)
        return model, *others

    columns = compare_results(Loop(build(setup)), Loop(build(setup)), precision="float32", seed=0)
    assert columns["status"] == "ok"


def test_a_turn_has_a_step_for_each_batch_that_workers_prepare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def time_none(actions: dict[str, Any], *, calls: int, **_: Any) -> dict[str, Any]:
        asked.append(calls)
        return {name: {"": [1.0]} for name in actions}

    monkeypatch.setattr(CLOCK, time_none)

    def make(workers: int = 0) -> Any:
        data: Any = list(torch.randn(16, 8))

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            time.sleep(0.06)  # one step fills a turn
            return model(batch).square().mean()

        return build(lambda: linear(DataLoader(data, batch_size=4, num_workers=workers), loss))

    assert len([*measure_values(make, "workers", (0, 2), {})]) == 2
    assert asked == [4]


@pytest.mark.parametrize("changes", [("torch.compile",), ("one thread", "torch.compile")])
def test_nothing_is_compiled_in_a_timed_step(
    changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()  # what an earlier test has compiled
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def time_steps(actions: Any, *, prepare: Any, **_: Any) -> dict[str, Any]:
        before = len(compiled)
        prepare("changed")
        for _ in range(4):
            actions["changed"][""]()
        assert len(compiled) == before > 0
        return {name: {"": [1.0]} for name in actions}

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr("labkit.studies.your_training.changes.no_compiler_reason", lambda _: None)
    monkeypatch.setattr(CLOCK, time_steps)
    # Four rows, four, and two.
    rows_of_data: Any = list(torch.randn(10, 8))
    loader = DataLoader(rows_of_data, batch_size=4)
    point = YourTrainingPoint(sweep="changes", warmup=0, repeats=1)
    make = partial(build, lambda: linear(loader))
    with threads(2):  # what a change of threads would be compiled again for
        rows = list(compare(point, make, "changed", changes))
    assert [row["status"] for row in rows] == ["ok", "ok"]


def test_a_loader_of_workers_gives_the_same_batches() -> None:
    training = build(load_setup(f"{FOLDER / 'images'}.py"))
    loader = apply(training, ["loader workers"]).training.batches
    assert isinstance(loader, DataLoader)
    assert loader.num_workers > 0
    (row,) = [row for row in rows_of_changes("images") if row.get("change") == "loader workers"]
    assert row["status"] == "ok"
    assert row["is_exact"]


def slow_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    time.sleep(0.02)
    return model(batch).square().mean()


def test_the_slowest_line_is_named_with_its_time() -> None:
    loop = Loop(build(lambda: linear(loss=slow_loss)))
    with loop.turn():
        rows = {row["line"]: row for row in line_rows(loop, 10)}
    line = f"{Path(__file__).name}:{slow_loss.__code__.co_firstlineno + 1}"
    assert max(rows, key=lambda name: rows[name]["forward_share"]) == line


def twice(model: nn.Module, batch: Any) -> torch.Tensor:
    model(batch).square().mean()
    return model(batch).square().mean()


def test_a_forward_pass_that_trains_nothing_is_named() -> None:
    # Large enough to be seen: stacks are looked at every millisecond.
    loop = Loop(build(lambda: (nn.Linear(256, 256), [torch.randn(4096, 256)], twice)))
    # In a thread, below which no line of this file stands: it would be the outermost one.
    with loop.turn(), ThreadPoolExecutor() as pool:
        rows = pool.submit(list, line_rows(loop, 3)).result()
    first = twice.__code__.co_firstlineno
    unused = {row["line"] for row in rows if row["unused_share"]}
    assert unused == {f"{Path(__file__).name}:{first + 1}"}


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return gradient * 2


def test_a_backward_pass_has_its_time_between_operators_too() -> None:
    loop = Loop(
        build(lambda: linear(loss=lambda model, x: SlowBackward.apply(model(x)).square().mean()))
    )
    with loop.turn():
        shares = {row["line"]: row["backward_share"] for row in line_rows(loop, 3)}
    line = f"{Path(__file__).name}:{SlowBackward.forward.__code__.co_firstlineno + 2}"
    assert shares[line] > 0.5


class Doubling(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.ones(8)
        for _ in range(10):
            x = x * 2
        return x


def test_operators_of_a_data_set_are_no_part_of_a_pass() -> None:
    loop = Loop(build(lambda: linear(DataLoader(Doubling(), batch_size=4))))
    with loop.turn():
        calls = {row["line"]: row["calls"] for row in line_rows(loop, 3)}
    line = f"{Path(__file__).name}:{Doubling.__getitem__.__code__.co_firstlineno + 3}"
    assert calls.get(line, 0) == 0
    assert max(calls.values()) > 0


def rows_of_argument(name: str, argument: str, values: tuple[int, ...] = ()) -> list[Any]:
    rows = rows_of(name, sweep="argument", swept=argument, swept_values=values)
    return [row for row in rows if row["kind"] == "argument"]


def test_values_of_an_argument_are_timed_per_sample() -> None:
    rows = rows_of_argument("gpt", "batch", (2, 8))
    assert [(row["argument"], row["n_samples"]) for row in rows] == [("batch=2", 2), ("batch=8", 8)]
    assert len(rows[0]["seconds"]) == len(rows[1]["seconds"]) >= 6


def test_seconds_per_sample_are_of_as_many_samples_as_the_turn_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Epochs of eight samples and two.
    rows_of_data: Any = list(torch.randn(10, 8))

    def make(batch: int) -> Any:
        return build(lambda: linear(DataLoader(rows_of_data, batch_size=batch)))

    def time_turn(actions: Any, *, calls: int, prepare: Any, **_: Any) -> dict[str, Any]:
        for name, parts in actions.items():
            prepare(name)
            for _call in range(calls):
                parts[""]()
        return {name: {"": [1.0]} for name in actions}

    monkeypatch.setattr(CLOCK, time_turn)
    monkeypatch.setattr("labkit.studies.your_training.loop.MAX_CALLS", 2)
    seconds = {row["argument"]: row["seconds"] for row in measure_values(make, "batch", (5, 8), {})}
    assert seconds == {"batch=5": [1 / 5], "batch=8": [1 / 5]}


def test_the_batches_that_fit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(available: float) -> float:
        package = "labkit.studies.your_training"
        monkeypatch.setattr(f"{package}.arguments.available_bytes", lambda device: available)
        monkeypatch.setattr(f"{package}.worker.measure_values", lambda *_: iter([]))
        (row,) = rows_of("gpt", sweep="argument", swept="batch")
        assert row["kind"] == "fits"
        return float(row["largest_batch"])

    small, large = (largest(available) for available in (2e7, 4e7))
    # 16 tokens of 64 logits and of activations that are some 20 times as wide
    assert 100 < small < 5000
    assert large == pytest.approx(2 * small, rel=0.05)


def test_no_batch_is_larger_than_the_data_set() -> None:
    # 16 items, in batches of 4.
    fits, *rows = rows_of("dictionaries", sweep="argument", swept="batch")
    assert fits["largest_batch"] == 16
    assert fits["is_all_data"]
    assert [row["n_samples"] for row in rows] == [2, 4, 8, 16]


def test_a_sample_has_its_bytes_if_the_default_batch_is_all_the_data() -> None:
    setup = load_setup(f"{FOLDER / 'dictionaries'}.py")
    rows = [find_batches(partial(build, setup), default)[0] for default in (2, 16)]
    assert rows[1]["largest_batch"] == 16
    assert rows[1]["sample_bytes"] == pytest.approx(rows[0]["sample_bytes"], rel=0.2)
    assert rows[0]["sample_bytes"] > 8


def test_a_value_that_the_setup_refuses_costs_no_other() -> None:
    rows = rows_of_argument("gpt", "length", (-3, 4))
    assert [row["status"] for row in rows] == ["failed", "ok"]
