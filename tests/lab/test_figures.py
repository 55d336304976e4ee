"""Figures: they draw exactly the points they save, and save the same bytes twice."""

import json
import re
from xml.etree import ElementTree

import pandas as pd
import pytest
from IPython.core.formatters import DisplayFormatter

from labkit.lab.figures import areas, bars, lines, timeline, waterfall
from labkit.lab.figures.ticks import log_ticks
from labkit.lab.figures.vector import drawing

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


def _draw(**options):
    return lines(FRAME, x="n_bytes", y="seconds", hue="algorithm", **options)


def test_the_saved_table_is_what_is_drawn(tmp_path):
    plot = _draw(facet="world_size", reference=FRAME.assign(seconds=1.0))
    plot.save(tmp_path / "figure_2.7B")
    assert {path.name for path in tmp_path.iterdir()} == {"figure_2.7B.png", "figure_2.7B.csv"}
    saved = pd.read_csv(tmp_path / "figure_2.7B.csv")
    assert len(saved) == 8
    assert set(saved["source"]) == {"measured here", "published"}
    drawn = [line.get_xydata().tolist() for axis in plot.with_published.figure.axes for line in axis.get_lines()]
    points = {tuple(point) for line in drawn for point in line}
    assert {(row.n_bytes, row.seconds) for row in saved.itertuples()} <= points


@pytest.mark.parametrize("draw", [lines, bars])
def test_what_was_published_is_saved_but_drawn_on_demand_only(draw, tmp_path):
    published = FRAME.assign(seconds=1e3)
    plot = draw(FRAME, x="n_bytes", y="seconds", hue="algorithm", reference=published)
    assert plot.with_published is not None
    assert set(plot.data["source"]) == {"measured here"}
    assert plot.figure.axes[0].get_ylim()[1] < 1  # not stretched by it
    assert set(plot.with_published.data["source"]) == {"measured here", "published"}
    plot.save(tmp_path / "figure")
    assert len(pd.read_csv(tmp_path / "figure.csv")) == 8
    assert draw(FRAME, x="n_bytes", y="seconds", hue="algorithm").with_published is None


def test_in_the_legend_what_ends_highest_is_first_and_published_lines_are_named_once():
    plot = _draw(reference=FRAME)
    names = [[text.get_text() for text in one.figure.legends[0].get_texts()] for one in (plot, plot.with_published)]
    assert names == [["torch", "ring"], ["torch", "ring", "published"]]


def test_several_points_at_one_x_are_dots_and_no_line_goes_up_and_down_there():
    for frame, style in ((FRAME, "-"), (pd.concat([FRAME, FRAME.assign(seconds=1.0)]), "None")):
        plot = lines(frame, x="n_bytes", y="seconds", hue="algorithm")
        assert {line.get_linestyle() for line in plot.figure.axes[0].get_lines()} == {style}


def test_a_panel_has_few_lines():
    many = pd.concat([FRAME.iloc[:2].assign(algorithm=f"algorithm {number}") for number in range(8)])
    figure = lines(many, x="n_bytes", y="seconds", hue="algorithm", facet="world_size").figure
    drawn = [sum(len(line.get_xdata()) > 1 for line in axis.get_lines()) for axis in figure.axes]
    assert drawn == [4, 4]


def test_ticks_are_written_exactly():
    for seconds in ([1.0, 1.09], [0.9996, 1.0001], [3.0, 41.0], [1.03, 1.19]):
        for log in ("", "y"):
            frame = FRAME.iloc[:2].assign(ratio=seconds)
            plot = lines(frame, x="n_bytes", y="ratio", log=log)
            plot.png()
            axis = plot.figure.axes[0]
            shown = [label.get_text() for label in axis.get_yticklabels()]
            assert [float(text) for text in shown] == pytest.approx(list(axis.get_yticks()), rel=1e-9)
            assert len(set(shown)) == len(shown)


def test_an_axis_says_which_way_is_better():
    assert "lower is faster" in _draw().figure.axes[0].get_ylabel()
    rates = FRAME.assign(busbw_gb_per_s=1.0)
    assert "higher is better" in lines(rates, x="n_bytes", y="busbw_gb_per_s").figure.axes[0].get_ylabel()


def test_on_a_logarithmic_axis_are_dots_with_intervals_and_no_bars():
    axis = bars(STEPS, x="model", y="seconds", hue="phase", log=True).figure.axes[0]
    assert not axis.patches
    assert sum(line.get_marker() in "os" for line in axis.get_lines()) == 2
    assert sum(len(collection.get_segments()) for collection in axis.collections) == 4


def test_a_drawing_has_its_text_as_text_the_colors_of_the_page_and_values_to_point_at():
    plot = _draw(facet="world_size")
    drawn, places = drawing(plot, "one")
    assert (drawn, places) == drawing(_draw(facet="world_size"), "one")
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.tag.endswith("text")]
    assert {"1 KiB", "ring", "torch"} <= set(texts)
    assert not re.findall(r"#[0-9a-fA-F]{6}\b", drawn)
    assert not set(re.findall(r'id="([^"]*)"', drawn)) & set(re.findall(r'id="([^"]*)"', drawing(plot, "two")[0]))
    found = json.loads(places)
    assert all(0 <= edge <= 100 for *edges, _ in found for edge in edges)
    assert found[0][-1] == "ring · 1 KiB · 100 µs [90 µs, 120 µs]"
    assert found[0][1] > found[1][1]  # the smaller value is farther down


def test_axes_carry_units():
    plot = _draw()
    plot.png()
    axis = plot.figure.axes[0]
    labels = [label.get_text() for label in (*axis.get_xticklabels(), *axis.get_yticklabels())]
    assert "1 KiB" in labels
    assert any(label.endswith("ms") for label in labels)


def test_a_short_logarithmic_axis_has_ticks_to_read_it_by():
    for seconds in ([0.07, 0.08, 0.11, 0.14], [1.05, 1.1, 1.2, 1.9], [1e-4, 1e-2, 1e-1, 1.0]):
        frame = FRAME.drop(columns=["low", "high"]).assign(seconds=seconds)
        plot = lines(frame, x="n_bytes", y="seconds", hue="algorithm")
        plot.png()
        axis = plot.figure.axes[0]
        low, high = axis.get_ylim()
        assert sum(low <= tick <= high for tick in axis.get_yticks()) >= 3


@pytest.mark.parametrize("facet", [None, "world_size"])
def test_rows_without_a_value_are_nothing_to_draw(facet):
    empty = FRAME.assign(seconds=float("nan"))
    for draw in (lines, bars):
        plot = draw(empty, x="n_bytes", y="seconds", hue="algorithm", facet=facet)
        assert "nothing was measured" in plot.figure.texts[0].get_text()


STEPS = pd.DataFrame(
    {
        "model": ["nano", "nano", "mini", "mini"],
        "phase": ["forward", "backward"] * 2,
        "seconds": [1.0, 2.0, 10.0, 20.0],
        "low": [0.9, 1.9, 9.0, 19.0],
        "high": [1.1, 2.1, 11.0, 21.0],
    }
)


def _heights(axis):
    return sorted(patch.get_height() for patch in axis.patches)


def test_bars_stand_side_by_side_or_on_one_another():
    beside = bars(STEPS, x="model", y="seconds", hue="phase")
    assert _heights(beside.figure.axes[0]) == [1, 2, 10, 20]
    assert {patch.get_y() for patch in beside.figure.axes[0].patches} == {0}
    stacked = bars(STEPS, x="model", y="seconds", hue="phase", stacked=True)
    assert {patch.get_y() for patch in stacked.figure.axes[0].patches} == {0, 1, 10}


def test_published_bars_get_a_panel_of_their_own_with_their_own_categories(tmp_path):
    published = STEPS.assign(model=STEPS["model"].replace({"nano": "xl"}))
    plot = bars(STEPS, x="model", y="seconds", hue="phase", reference=published)
    plot.save(tmp_path / "figure")
    plot = plot.with_published
    assert set(pd.read_csv(tmp_path / "figure.csv")["source"]) == {"measured here", "published"}
    names = [[label.get_text() for label in axis.get_xticklabels()] for axis in plot.figure.axes]
    assert names == [["nano", "mini"], ["xl", "mini"]]
    assert plot.figure.axes[1].get_title(loc="left") == "published"


def test_bars_stand_around_their_tick_whatever_other_panels_hold():
    here = pd.DataFrame({"device": "cpu", "seconds": [1.0, 2.0], "parts": ["own", "torch"]})
    there = pd.DataFrame({"device": "GPU", "seconds": [1.0, 2.0, 3.0], "parts": ["own", "other", "torch"]})
    order = ["own", "other", "torch"]
    plot = bars(here, x="device", y="seconds", hue="parts", hue_order=order, reference=there)
    plot = plot.with_published
    for axis in plot.figure.axes:
        centers = [patch.get_x() + patch.get_width() / 2 for patch in axis.patches]
        assert sum(centers) == pytest.approx(0)
        assert sum(axis.get_xlim()) == pytest.approx(0)


def test_published_bars_alone_are_hatched_too():
    table = pd.DataFrame({"size": ["small", "large"], "ratio": [0.8, 0.9], "phase": ["step", "step"]})
    for source, hatch in (("measured here", None), ("published, H100", "//")):
        plot = bars(table, x="size", y="ratio", hue="phase", source=source)
        assert {patch.get_hatch() for patch in plot.figure.axes[0].patches} == {hatch}


def test_names_that_would_touch_their_neighbors_are_slanted():
    table = pd.DataFrame({"mode": ["inference", "full step"] * 4, "seconds": 1.0, "model": [*"aabbccdd"]})
    for wanted, names in ((25, ["inference", "full step"]), (0, ["fwd", "step"])):
        renamed = table.assign(mode=names * 4, measure="clock")
        plot = bars(renamed, x="mode", y="seconds", hue="measure", facet="model")
        assert {label.get_rotation() for axis in plot.figure.axes for label in axis.get_xticklabels()} == {wanted}


def test_many_panels_of_lines_take_several_rows():
    panels = pd.concat([FRAME.assign(panel=f"panel {index}", world_size=2) for index in range(5)])
    for count, rows, columns in ((1, 1, 1), (3, 1, 3), (4, 2, 2), (5, 2, 3)):
        some = panels[panels["panel"] < f"panel {count}"]
        figure = lines(some, x="n_bytes", y="seconds", hue="algorithm", facet="panel").figure
        assert len(figure.axes) == count
        grid = figure.axes[0].get_gridspec()
        assert (grid.nrows, grid.ncols) == (rows, columns)
        assert sum(axis.get_ylabel() != "" for axis in figure.axes) == rows


def test_bars_that_would_hide_one_another_are_refused_and_those_without_a_place_come_last():
    both = pd.concat([STEPS.assign(precision="float32"), STEPS.assign(precision="bfloat16")])
    with pytest.raises(ValueError, match=r"one row per point, got several for .*nano"):
        bars(both, x="model", y="seconds", hue="phase")
    assert len(bars(both, x="model", y="seconds", hue="phase", facet="precision").figure.axes) == 2
    figure = bars(STEPS, x="model", y="seconds", hue="phase", hue_order=["forward"]).figure
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[0] == "forward"
    assert set(names) == set(STEPS["phase"])


def test_areas_are_steps_that_add_up():
    frame = pd.DataFrame({"at_s": [0, 1, 1, 2], "kind": ["a", "a", "b", "a"], "bytes": [1.0, 2.0, 5.0, 3.0]})
    axis = areas(frame, x="at_s", y="bytes", hue="kind", hue_order=["a", "b"]).figure.axes[0]
    tops = [collection.get_paths()[0].vertices[:, 1].max() for collection in axis.collections]
    assert tops == [3.0, 7.0]


def test_a_timeline_starts_at_its_first_box():
    frame = pd.DataFrame({"start_s": [5.0, 6.0], "duration_s": [1.0, 0.5], "lane": ["x", "y"], "kind": ["m", "m"]})
    plot = timeline(frame, start="start_s", duration="duration_s", lane="lane", hue="kind")
    assert plot.data["start_s"].tolist() == [0, 1]
    assert [label.get_text() for label in plot.figure.axes[0].get_yticklabels()] == ["x", "y"]


PARTS = pd.DataFrame(
    {
        "part": ["products", "attention", "waiting"] * 2,
        "step_s": [3.0, 1.0, 0.5, 3.0, 1.0, 2.0],
        "low": [2.5, 0.9, 0.4, None, None, None],
        "high": [3.5, 1.1, 0.6, None, None, None],
        "kind": ["compute", "compute", "communication"] * 2,
        "gpus": [8] * 3 + [16384] * 3,
    }
)


def _boxes(axis):
    return [(box.get_x(), box.get_x() + box.get_width()) for box in axis.patches]


def test_each_box_of_a_waterfall_begins_where_the_last_one_ended_and_the_last_is_the_whole():
    plot = waterfall(PARTS, part="part", y="step_s", hue="kind", facet="gpus")
    few, many = plot.figure.axes
    assert _boxes(few) == [(0, 3), (3, 4), (4, 4.5), (0, 4.5)]
    assert _boxes(many) == [(0, 3), (3, 4), (4, 6), (0, 6)]
    assert few.get_xlim() == many.get_xlim()
    assert few.get_title(loc="left") == "8 GPUs"
    assert [mark.text for mark in plot.marks[:4]] == [
        *("products · 3 s [2.5 s, 3.5 s]", "attention · 1 s [900 ms, 1.1 s]", "waiting · 500 ms [400 ms, 600 ms]"),
        "total · 4.5 s",
    ]
    assert all(mark.right <= few.get_xlim()[1] for mark in plot.marks)


def test_a_box_too_small_to_see_says_no_more_than_that():
    frame = pd.DataFrame({"part": ["a", "b"], "seconds": [1.0, 0.000912]})
    plot = waterfall(frame, part="part", y="seconds").of_source("predicted")
    assert "< 0.1%" in [text.get_text() for text in plot.figure.axes[0].texts]
    assert set(plot.data["source"]) == {"predicted"}
    assert "predicted" in plot.csv()


def test_a_waterfall_takes_a_measured_whole_and_leaves_parts_empty_that_are_not_there():
    whole = pd.DataFrame({"part": ["step"], "step_s": [5.0], "low": [4.0], "high": [9.0], "gpus": [8]})
    frame = pd.concat([PARTS.drop(index=5), whole], ignore_index=True)
    plot = waterfall(
        frame,
        part="part",
        y="step_s",
        total="step",
        facet="gpus",
        hue="kind",
    )
    few, many = plot.figure.axes
    assert _boxes(few)[-1] == (0, 5)  # and the parts reach 4.5: something is missing
    assert few.get_xlim()[1] > 9  # room for the interval
    assert _boxes(many) == [(0, 3), (3, 4), (0, 4)]


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (PARTS.assign(step_s=-1.0), {"facet": "gpus"}, "zero or more"),
        (PARTS, {}, "one row per point"),
        (PARTS, {"facet": "gpus", "part_order": ["products"]}, "among"),
    ],
)
def test_a_waterfall_refuses_what_it_cannot_draw(frame, options, message):
    with pytest.raises(ValueError, match=message):
        waterfall(frame, part="part", y="step_s", **options)


@pytest.mark.parametrize(
    ("draw", "columns"),
    [
        (lines, {"x": "low", "y": "seconds", "hue": "phase"}),
        (bars, {"x": "model", "y": "seconds", "hue": "phase"}),
        (areas, {"x": "seconds", "y": "low", "hue": "phase"}),
        (timeline, {"start": "low", "duration": "seconds", "lane": "phase", "hue": "model"}),
        (waterfall, {"part": "phase", "y": "seconds", "facet": "model"}),
    ],
)
def test_every_figure_says_that_nothing_was_measured_and_draws_the_same_twice(draw, columns):
    assert "nothing was measured" in draw(STEPS.iloc[:0], **columns).figure.texts[0].get_text()
    assert draw(STEPS, **columns).png() == draw(STEPS, **columns).png()
    with pytest.raises(ValueError, match="no column"):
        draw(STEPS.drop(columns="phase"), **columns)


RATES = FRAME.assign(busbw_gb_per_s=[1.0, 2.0, 3.0, 4.0])[
    ["n_bytes", "algorithm", "world_size", "seconds", "low", "high", "busbw_gb_per_s"]
]


def _error_bars(plot):
    """Vertical lines and caps, however they were drawn."""
    lengths = [
        segment[1][1] - segment[0][1]
        for axis in plot.figure.axes
        for collection in axis.collections
        for segment in collection.get_segments()
    ]
    return sum(length > 0 for length in lengths)


@pytest.mark.parametrize("draw", [lines, bars])
def test_an_interval_is_drawn_around_its_own_column_alone(draw):
    by_time = draw(RATES, x="n_bytes", y="seconds", hue="algorithm")
    assert _error_bars(by_time) == 2
    assert by_time.data["low"].notna().sum() == 2
    by_rate = draw(RATES, x="n_bytes", y="busbw_gb_per_s", hue="algorithm")
    assert _error_bars(by_rate) == 0
    assert not {"low", "high"} & set(by_rate.data)
    again = draw(by_time.data.drop(columns="source"), x="n_bytes", y="seconds", hue="algorithm")
    assert _error_bars(again) == 2  # what is saved can be drawn again


@pytest.mark.parametrize(
    ("draw", "columns"),
    [
        (lines, {"x": "n_bytes", "y": "seconds"}),
        (bars, {"x": "model", "y": "seconds"}),
        (areas, {"x": "n_bytes", "y": "seconds"}),
        (timeline, {"start": "low", "duration": "seconds", "lane": "model"}),
        (waterfall, {"part": "model", "y": "seconds"}),
    ],
)
def test_without_a_hue_all_is_of_one_color_and_needs_no_legend(draw, columns):
    frame = FRAME.iloc[:2].assign(model=["nano", "mini"])
    plot = draw(frame, **columns)
    assert plot.figure.legends == []
    assert set(plot.data) - {"source", "low", "high"} <= set(columns.values())


def test_logarithmic_axes_are_named_or_not():
    for log, scales in (("", ("linear", "linear")), ("x", ("log", "linear"))):
        axis = _draw(log=log).figure.axes[0]
        assert (axis.get_xscale(), axis.get_yscale()) == scales
    with pytest.raises(ValueError, match="log names the logarithmic axes"):
        _draw(log="both")


@pytest.mark.parametrize("draw", [lines, bars])
@pytest.mark.parametrize("hue", ["algorithm", "world_size"])
def test_names_on_the_x_axis_stand_in_the_order_of_their_rows(draw, hue):
    frame = FRAME.iloc[[2, 0]]  # torch, then ring
    plot = draw(frame, x="algorithm", y="seconds", hue=hue)
    axis = plot.figure.axes[0]
    plot.png()
    assert [label.get_text() for label in axis.get_xticklabels()] == ["torch", "ring"]
    if draw is lines:
        assert sorted(tuple(line.get_xydata()[0]) for line in axis.get_lines() if line.get_marker() in "os") == [
            (0.0, 2e-4),
            (1.0, 1e-4),
        ]
    else:
        assert _heights(axis) == [1e-4, 2e-4]


def test_a_plot_is_a_picture_for_a_notebook_and_a_line_for_a_console():
    plot = _draw()
    assert list(DisplayFormatter().format(plot)[0]) == ["text/plain", "image/png"]
    assert repr(plot) == "figure of 4 rows: n_bytes, seconds, low, high, algorithm, source"


@pytest.mark.parametrize("decades", range(1, 9))
def test_labels_of_ticks_have_room_however_long_an_axis_is(decades):
    start, end = 1e-6, 10.0 ** (decades - 6)
    shown = [tick for tick in log_ticks("seconds").tick_values(start, end) if start <= tick <= end]
    assert 3 <= len(shown) <= 10
