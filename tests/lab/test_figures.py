"""Figures: they draw exactly the points they save, and save the same bytes twice."""

import json
import re
from xml.etree import ElementTree

import pandas as pd
import pytest

from labkit.lab.figures import Areas, Bars, Lines, Timeline
from labkit.lab.figures.draw import draw as draw_results
from labkit.lab.figures.draw import draw_frame
from labkit.lab.figures.style import GROUPS, PALETTE, in_order, log_ticks
from labkit.lab.metric import Metric, Results

FRAME = pd.DataFrame(
    {
        "n_bytes": [1024, 2**20] * 2,
        "seconds": [1e-4, 1e-2, 2e-4, 3e-2],
        "low": [0.9e-4, 0.9e-2, None, None],
        "high": [1.2e-4, 1.1e-2, None, None],
        "algorithm": ["ring", "ring", "torch", "torch"],
        "world_size": [2, 2, 4, 4],
    }
)
STEPS = pd.DataFrame(
    {
        "model": ["nano", "nano", "mini", "mini"],
        "phase": ["forward", "backward"] * 2,
        "seconds": [1.0, 2.0, 10.0, 20.0],
        "low": [0.9, 1.9, 9.0, 19.0],
        "high": [1.1, 2.1, 11.0, 21.0],
    }
)
BY_SIZE = {"x": "n_bytes", "y": "seconds", "hue": "algorithm"}
BY_MODEL = {"x": "model", "y": "seconds", "hue": "phase"}


def draw(frame=FRAME, **options):
    return draw_frame(Lines(**BY_SIZE | options), frame)


def texts(labels):
    return [label.get_text() for label in labels]


def interval_lines(plot):
    """How many vertical lines have a length."""
    lines = [one for axis in plot.figure.axes for one in axis.collections]
    return sum(segment[1][1] > segment[0][1] for line in lines for segment in line.get_segments())


def test_the_files_of_a_figure_have_exactly_what_is_drawn(tmp_path):
    plot = draw(panel="world_size")
    plot.save(tmp_path / "figure_2.7B")
    assert {path.name for path in tmp_path.iterdir()} == {"figure_2.7B.svg", "figure_2.7B.csv"}
    saved = pd.read_csv(tmp_path / "figure_2.7B.csv")
    points = {
        tuple(point)
        for axis in plot.figure.axes
        for line in axis.get_lines()
        for point in line.get_xydata()
    }
    assert {(row.n_bytes, row.seconds) for row in saved.itertuples()} == points


def test_several_points_at_one_x_are_dots_and_the_legend_is_in_natural_order():
    for frame, style in ((FRAME, "-"), (pd.concat([FRAME, FRAME.assign(seconds=1.0)]), "None")):
        assert {line.get_linestyle() for line in draw(frame).figure.axes[0].get_lines()} == {style}
    assert texts(draw().figure.legends[0].get_texts()) == ["torch", "ring"]


def test_a_panel_has_few_lines_and_many_panels_take_several_rows():
    for lines, expected in ((8, [8]), (12, [6, 6])):
        many = pd.concat([FRAME.iloc[:2].assign(algorithm=f"no. {one}") for one in range(lines)])
        axes = draw(many, panel="world_size").figure.axes
        assert [
            sum(len(line.get_xdata()) > 1 for line in axis.get_lines()) for axis in axes
        ] == expected
    panels = pd.concat([FRAME.assign(panel=f"panel {index}") for index in range(5)])
    for count, shape in ((1, (1, 1)), (3, (1, 3)), (4, (2, 2)), (5, (2, 3))):
        axes = draw(panels[panels["panel"] < f"panel {count}"], panel="panel").figure.axes
        grid = axes[0].get_gridspec()
        assert (len(axes), (grid.nrows, grid.ncols)) == (count, shape)
        assert sum(axis.get_ylabel() != "" for axis in axes) == grid.nrows


@pytest.mark.parametrize("log", ["", "y"])
@pytest.mark.parametrize("values", [[1.0, 1.09], [0.9996, 1.0001], [3.0, 41.0], [1.03, 1.19]])
def test_ticks_are_written_exactly(values, log):
    plot = draw_frame(Lines(x="n_bytes", y="ratio", log=log), FRAME.iloc[:2].assign(ratio=values))
    assert plot.svg
    axis = plot.figure.axes[0]
    labels = texts(axis.get_yticklabels())
    assert [float(text) for text in labels] == pytest.approx(list(axis.get_yticks()), rel=1e-9)
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("end", [1.5e-6, 3e-6, *(10.0 ** (decades - 6) for decades in range(1, 9))])
def test_a_logarithmic_axis_has_ticks_to_read_it_by_and_room_for_their_labels(end):
    ticks = [
        tick
        for tick in log_ticks("seconds", 1e-6, end).tick_values(1e-6, end)
        if 1e-6 <= tick <= end
    ]
    assert 3 <= len(ticks) <= 10


def test_axes_carry_units_say_which_way_is_better_and_are_logarithmic_where_that_is_named():
    plot = draw()
    assert plot.svg
    axis = plot.figure.axes[0]
    assert "1 KiB" in texts(axis.get_xticklabels())
    assert any(text.endswith("ms") for text in texts(axis.get_yticklabels()))
    assert "lower is faster" in axis.get_ylabel()
    rates = draw(FRAME.assign(busbw_gb_per_s=1.0), y="busbw_gb_per_s")
    assert "higher is better" in rates.figure.axes[0].get_ylabel()
    for log, scales in (("", ("linear", "linear")), ("x", ("log", "linear"))):
        axis = draw(log=log).figure.axes[0]
        assert (axis.get_xscale(), axis.get_yscale()) == scales
    with pytest.raises(ValueError, match="log names the logarithmic axes"):
        draw(log="both")


def test_a_drawing_has_its_text_as_text_the_colors_of_the_page_and_values_to_point_at():
    plot = draw(panel="world_size")
    again = draw(panel="world_size")
    svg = plot.page_svg()
    assert (svg, plot.places()) == (again.page_svg(), again.places())
    elements = ElementTree.fromstring(svg).iter()
    assert {"1 KiB", "ring", "torch"} <= {
        element.text for element in elements if element.tag.endswith("text")
    }
    assert not re.findall(r"#[0-9a-fA-F]{6}\b", svg)
    # A page shades the edge at which a narrow screen cuts a figure off: nothing may cover it.
    assert "fill: var(--labkit-page)" not in svg
    other = draw(FRAME.assign(seconds=1.0)).page_svg()
    assert not set(re.findall(r'id="([^"]*)"', svg)) & set(re.findall(r'id="([^"]*)"', other))
    places = json.loads(plot.places())
    assert all(0 <= edge <= 100 for *edges, _ in places for edge in edges)
    assert places[0][-1] == "ring · 1 KiB · 100 µs [90 µs, 120 µs]"
    assert places[0][1] > places[1][1]  # the smaller value is farther down


def test_a_caption_says_which_of_several_values_is_plotted():
    figure = Lines(x="n_bytes", y="seconds", at={"batch": None, "size": "mini", "n_bytes": 1024})
    frame = pd.DataFrame({"n_bytes": [1024, 1024, 2048], "batch": [32, 64, 64], "size": "mini"})
    results = Results(frame.assign(seconds=1.0))
    assert figure.caption(results, results.frame) == "Plotted: batch 64, 1 KiB."
    assert figure.caption(results, None) == ""


def heights(axis):
    return sorted(patch.get_height() for patch in axis.patches)


def test_bars_stand_side_by_side_around_their_tick_or_on_one_another():
    axis = draw_frame(Bars(**BY_MODEL), STEPS).figure.axes[0]
    assert heights(axis) == [1, 2, 10, 20]
    assert {patch.get_y() for patch in axis.patches} == {0}
    assert sum(patch.get_x() + patch.get_width() / 2 for patch in axis.patches) == pytest.approx(
        2 * 1
    )
    stacked = draw_frame(Bars(**BY_MODEL, stacked=True), STEPS).figure.axes[0]
    assert {patch.get_y() for patch in stacked.patches} == {0, 1, 10}
    assert texts(stacked.figure.legends[0].get_texts()) == ["backward", "forward"]
    panels = draw_frame(Bars(x="phase", y="seconds", panel="model"), STEPS).figure.axes
    tops = [axis.get_ylim()[1] for axis in panels]
    assert tops[0] < 0.2 * tops[1]  # else the bars of the small model could not be read
    both = pd.concat([STEPS.assign(precision="float32"), STEPS.assign(precision="bfloat16")])
    # which would hide one another
    with pytest.raises(ValueError, match=r"one row per bar, got several for .*nano"):
        draw_frame(Bars(**BY_MODEL), both)
    assert len(draw_frame(Bars(**BY_MODEL, panel="precision"), both).figure.axes) == 2


def test_areas_are_steps_that_add_up():
    frame = pd.DataFrame(
        {"at_s": [0, 1, 1, 2], "kind": ["a", "a", "b", "a"], "bytes": [1.0, 2.0, 5.0, 3.0]}
    )
    axis = draw_frame(Areas(x="at_s", y="bytes", hue="kind", order=("a", "b")), frame).figure.axes[
        0
    ]
    assert [area.get_paths()[0].vertices[:, 1].max() for area in axis.collections] == [3.0, 7.0]


def test_a_timeline_starts_at_its_first_box():
    frame = pd.DataFrame(
        {"start_s": [5.0, 6.0, 7.0], "duration_s": [1.0, 0.5, 0.5], "lane": ["x", "y", "y"]}
    )
    plot = draw_frame(Timeline(x="start_s", y="duration_s", lane="lane"), frame)
    assert plot.data["start_s"].tolist() == [0, 1, 2]
    axis = plot.figure.axes[0]
    assert texts(axis.get_yticklabels()) == ["x", "y"]
    assert not axis.texts  # a lane has several boxes, whose values would touch
    assert plot.marks[1].text == "y · 500 ms from 1 s on"


def test_a_timeline_of_one_box_per_lane_has_their_values_inside_the_axis():
    frame = pd.DataFrame(
        {"part": ["a", "b", "step"], "at": [0.0, 1.0, 0.0], "seconds": [1.0, 2.0, 3.0]}
    )
    frame = frame.assign(low=[None, None, 2.5], high=[None, None, 9.0])
    plot = draw_frame(Timeline(x="at", y="seconds", lane="part"), frame)
    axis = plot.figure.axes[0]
    assert [(box.get_x(), box.get_x() + box.get_width()) for box in axis.patches] == [
        (0, 1),
        (1, 3),
        (0, 3),
    ]
    assert texts(axis.texts) == ["1 s", "2 s", "3 s"]
    assert axis.get_xlim()[1] > 9
    assert plot.marks[2].text == "step · 3 s [2.5 s, 9 s]"


KINDS = {
    "lines": Lines(x="low", y="seconds", hue="phase"),
    "bars": Bars(**BY_MODEL),
    "areas": Areas(x="seconds", y="low", hue="phase"),
    "timeline": Timeline(x="low", y="seconds", lane="phase", hue="model"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_says_that_nothing_was_measured_and_draws_the_same_twice(kind):
    figure = KINDS[kind]
    for empty in (STEPS.iloc[:0], STEPS.assign(seconds=float("nan"), low=float("nan"))):
        assert "nothing was measured" in draw_frame(figure, empty).figure.texts[0].get_text()
    assert draw_frame(figure, STEPS).svg == draw_frame(figure, STEPS).svg
    with pytest.raises(ValueError, match="no column"):
        draw_frame(figure, STEPS.drop(columns="phase"))


@pytest.mark.parametrize("kind", [Lines, Bars])
def test_an_interval_is_drawn_around_its_own_column_alone(kind):
    rates = FRAME.drop(columns="world_size").assign(busbw_gb_per_s=[1.0, 2.0, 3.0, 4.0])
    by_time = draw_frame(kind(**BY_SIZE), rates)
    assert interval_lines(by_time) == 2
    assert by_time.data["low"].notna().sum() == 2
    by_rate = draw_frame(kind(**BY_SIZE | {"y": "busbw_gb_per_s"}), rates)
    assert interval_lines(by_rate) == 0
    assert not {"low", "high"} & set(by_rate.data)
    # what is saved can be drawn again
    assert interval_lines(draw_frame(kind(**BY_SIZE), by_time.data)) == 2


def look(plot, name):
    """Color and marker of a name in the legend."""
    (legend,) = plot.figure.legends
    place = texts(legend.get_texts()).index(name)
    handle = legend.legend_handles[place]
    return handle.get_color(), handle.get_marker()


def test_a_name_has_one_color_and_marker_on_all_pages_and_a_readers_own_recolors_none():
    mine = pd.concat([FRAME.iloc[:2].assign(algorithm=name) for name in ("a_ring", "mine")])
    with_mine = draw(pd.concat([mine, FRAME]))
    assert texts(with_mine.figure.legends[0].get_texts()) == ["torch", "ring", "a ring", "mine"]
    for name in ("torch", "ring"):
        assert look(with_mine, name) == look(draw(), name)
    assert look(draw(FRAME.assign(algorithm=["torch", "torch", "shared", "shared"])), "torch") == (
        look(draw(), "torch")
    )
    assert len({look(with_mine, name) for name in ("torch", "ring", "a ring", "mine")}) == 4


def test_a_name_of_two_groups_has_the_same_place_in_both():
    places = {name: set() for group in GROUPS for name in group}
    for group in GROUPS:
        assert len(group) <= len(PALETTE)
        for place, name in enumerate(group):
            places[name].add(place)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    "names",
    [
        ["nano, 64 tokens", "nano, 128 tokens", "mini, 64 tokens", "mini, 128 tokens"],
        ["2 ranks, 512 KiB", "2 ranks, 1 MiB", "10 ranks, 1 MiB"],
        ["torch", "ring", "mine"],
        [2, 10, "torch"],
    ],
)
def test_values_stand_in_natural_order_also_names_of_several_parts(names):
    assert in_order(reversed(names)) == names
    assert in_order(["b", "mine, 2", "a"]) == ["b", "mine, 2", "a"]


def test_bars_stand_in_natural_order():
    axis = draw_frame(Bars(x="phase", y="seconds", hue="model"), STEPS.iloc[::-1]).figure.axes[0]
    assert texts(axis.get_xticklabels()) == ["forward", "backward"]
    assert texts(axis.figure.legends[0].get_texts()) == ["nano", "mini"]


def test_a_reference_is_a_dashed_line_of_its_own_rows_or_one_across_each_bar():
    frame = FRAME.iloc[:2].assign(roof=[1.0, 2.0])
    ridge = pd.DataFrame([{"n_bytes": 4096, "algorithm": "ring", "roof": 5.0}])
    plot = draw(pd.concat([frame, ridge]), reference="roof")
    dashed = [line for line in plot.figure.axes[0].get_lines() if line.get_linestyle() == "--"]
    assert [line.get_ydata().tolist() for line in dashed] == [[1.0, 5.0, 2.0]]
    assert len(plot.marks) == 2
    assert texts(plot.figure.legends[0].get_texts()) == ["ring", "roof"]
    bars = draw_frame(
        Bars(**BY_MODEL, reference="formula"), STEPS.assign(formula=[1.5, 2.5, 11.0, 19.0])
    )
    (lines,) = [one for one in bars.figure.axes[0].collections if one.get_linestyle()[0][1]]
    assert sorted(line[0][1] for line in lines.get_segments()) == [1.5, 2.5, 11.0, 19.0]


def test_a_metric_at_one_x_has_its_alternatives_there():
    rows = [
        {"n_bytes": 1024, "way": way, "rank": 0, "repeat": repeat, "seconds": 1.0 + repeat}
        for way in ("gloo", "shared")
        for repeat in range(3)
    ]
    metric = Metric("seconds", "way", ("n_bytes",))
    plot = draw_results(Lines(source=metric, x="n_bytes"), Results(pd.DataFrame(rows)))
    assert set(plot.data["way"]) == {"gloo", "shared"}
