"""Numbers in sentences and tables of labs, computed again from the raw samples of recorded runs by
other code."""

from collections import Counter, defaultdict
from dataclasses import replace
from statistics import median

import pytest
import torch

from labkit.lab.figures.draw import draw
from labkit.lab.units import format_value
from labkit.lab.wording import headline
from labkit.machine.cgroups import available_cores
from labkit.machine.description import describe_machine
from labkit.studies import load_lab
from labkit.studies.memory import worker as memory
from labkit.studies.shared.alternatives import ALL_CORES, cores_of_all_ranks
from tests.pages.cells import recorded, run_of
from tests.parallel.shared_ranks import on_ranks

PHASES = ("forward", "backward", "optimizer")
PLANNED = ("ways", "alternatives")


def slowest(run, *names, **where):
    """Samples of the slowest rank, by values of these names of the point or the row."""
    by_rank = defaultdict(lambda: defaultdict(list))
    for row in run.rows:
        about = run.header.planned[row.point] | row.values
        if (
            all(about.get(name) == value for name, value in where.items())
            and "seconds" in row.values
        ):
            by_rank[tuple(about.get(name) for name in names)][row.rank] += row.values["seconds"]
    return {key: [*map(max, zip(*ranks.values(), strict=True))] for key, ranks in by_rank.items()}


def answers(run):
    return load_lab(run.header.lab).answers(run.results())


def test_limits_say_the_shortest_all_reduce_and_the_fastest_matmul_that_were_measured():
    said = answers(run := recorded("limits"))
    times = slowest(run, "world_size", "way", sweep="exchange", what="all-reduce", n_bytes=1024)
    assert format_value("seconds", median(times[min(times)])) in headline(said["exchange"])
    longest = slowest(run, "world_size", "way", sweep="exchange", what="all-reduce", n_bytes=2**24)
    rate = 2**24 / median(longest[min(times)])
    assert said["exchange"].values["bytes_per_s"] == pytest.approx(rate)
    products = slowest(
        run, "flops", "shape", "device", sweep="products", world_size=1, dtype="float32"
    )
    best = max(flops / median(seconds) for (flops, *_), seconds in products.items())
    assert format_value("flops_per_s", best) in headline(said["matmuls"])
    assert said["matmuls"].table.query("dtype == 'float32'")["flops_per_s"].max() == pytest.approx(
        best
    )


def test_averaging_costs_what_a_step_is_longer_and_never_hides_more_than_all():
    run = recorded("data_parallel")
    table = answers(run)["communication"].table.set_index(["implementation", "workload"])
    times = slowest(run, "implementation", "workload", "phase", sweep="wrappers")
    steps = {
        key[:2]: [*map(sum, zip(*(times[(*key[:2], phase)] for phase in PHASES), strict=True))]
        for key in times
    }
    for (name, workload), row in table.iterrows():
        local = steps["local", workload]
        longer = median(a - b for a, b in zip(steps[name, workload], local, strict=True)) / median(
            local
        )
        assert row["longer_percent"] == pytest.approx(100 * longer)

    def halved(_, row):
        is_faster = (
            row["values"].get("phase") == "backward"
            and row["values"].get("implementation") == "bucketed"
        )
        changed = (
            {"seconds": [0.2 * seconds for seconds in row["values"]["seconds"]]}
            if is_faster
            else {}
        )
        return row | {"values": row["values"] | changed}

    hidden = answers(run_of(run, halved))["communication"].table["hidden_percent"]
    assert hidden.max() == 100


def test_steps_with_checkpoints_have_the_same_gradients_and_are_timed():
    about = {
        "size": "nano",
        "context_length": 8,
        "batch": 1,
        "segments": (0, 2),
        "warmup": 0,
        "repeats": 1,
    }
    rows = list(memory.measure(memory.MemoryPoint(kind=memory.CHECKPOINT, **about)))
    assert [row["segment"] for row in rows if "seconds" in row] == [0, 2]
    assert {row["status"] for row in rows if "status" in row} == {"ok"}


def test_what_checkpointing_saves_is_counted_at_the_length_of_the_largest_model():
    """Counted at 128 tokens it was 20%, on the page whose largest model was trained at 2,048."""
    lab = load_lab("memory")
    config = lab.profiles["quick"]
    points = [p for p in lab.plan(config, describe_machine()) if p.kind == memory.CHECKPOINT]
    counted = [point.context_length for point in points if not point.repeats]
    timed = [point.context_length for point in points if point.repeats]
    assert counted == [max(config.counted_contexts)]
    assert timed == [max(config.contexts)]


def test_a_model_that_is_counted_at_two_lengths_has_a_panel_for_each():
    """At smoke, where one model is counted and timed, the page of the lab failed."""
    results = recorded("memory").results()
    frame = results.frame.copy()
    counted = (frame["kind"] == memory.CHECKPOINT) & (frame["size"] == "mini")
    frame.loc[counted, ["size", "context_length"]] = ["nano", 2048]
    figure = load_lab("memory").question("checkpointing").figure
    assert draw(figure, replace(results, frame=frame)).data["model"].nunique() == 2


def test_a_pair_is_measured_in_one_sweep_of_a_page():
    """In two, the same ratio was 0.849 and 0.690."""
    lab = load_lab("all_reduce")
    pairs = Counter()
    for point in lab.plan(lab.profiles["quick"], describe_machine()):
        if point.sweep != "scheduling":
            for name in set(point.algorithms) - {"torch"}:
                over = name if " over " in name else f"{name} over point_to_point"
                pairs[point.world_size, point.n_bytes, point.session, over] += 1
    assert set(pairs.values()) == {1}


@on_ranks(2)
def test_one_rank_that_is_compared_with_several_has_the_cores_of_all():
    outside = torch.get_num_threads()
    with cores_of_all_ranks():
        assert torch.get_num_threads() == min(available_cores(), 2 * outside)
    assert torch.get_num_threads() == outside


@pytest.mark.parametrize(
    ("lab", "question"), [("context_parallel", "length"), ("model_parallel", "width")]
)
def test_a_lab_measures_the_one_rank_that_it_compares_with(lab, question):
    declared = load_lab(lab)
    assert declared.question(question).baseline == ALL_CORES
    points = declared.plan(declared.profiles["quick"], describe_machine())
    assert any(ALL_CORES in getattr(point, name, ()) for point in points for name in PLANNED)


def test_what_a_layout_allows_is_the_mean_ranks_share_of_the_last_ones_scores():
    run = recorded("context_parallel")
    table = load_lab("context_parallel").question("efficiency").table(run.results())
    assert len(table)
    for row in table.to_dict("records"):
        layout = "contiguous" if "contiguous" in row["way"] else "zigzag"
        p = int(row["world_size"])
        # A query at position i sees i + 1 keys.
        scores = [
            int((positions_of_rank(int(row["sequence"]), p, rank, layout) + 1).sum())
            for rank in range(p)
        ]
        assert row["formula_efficiency"] == pytest.approx(sum(scores) / (p * max(scores)), rel=0.01)


def positions_of_rank(length, p, rank, layout):
    """What `local_positions` gives a rank, without ranks."""
    pieces = torch.arange(length).chunk(2 * p if layout == "zigzag" else p)
    return torch.cat([pieces[rank], pieces[-1 - rank]]) if layout == "zigzag" else pieces[rank]


def test_the_floor_lies_below_all_that_is_measured():
    times = slowest(
        recorded("all_reduce"), "world_size", "n_bytes", "algorithm", sweep="transports"
    )
    assert times
    for (*where, algorithm), seconds in times.items():
        assert algorithm == "floor" or median(seconds) > median(times[*where, "floor"])
