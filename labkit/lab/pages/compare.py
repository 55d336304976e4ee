"""The page of `labkit compare`: one table over all labs and machines, then each lab with figures and its settings."""

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import pandas as pd
from matplotlib.text import Text

from labkit.lab.columns import label, labels
from labkit.lab.config import ParameterError
from labkit.lab.figures import Plot, bars, lines
from labkit.lab.pages import cards
from labkit.lab.pages.export import read_page
from labkit.lab.pages.html import render, script, style_sheet
from labkit.lab.project import (
    kind_of_path,
    project_root,
    recorded_directory,
    relative_to_project,
    runs_directory,
    shipped,
)
from labkit.lab.runs.comparison import UNKNOWN_REPEAT_DIFFERENCE, LabComparison, overview
from labkit.lab.runs.store import Run, RunFileError, find_run

MOST_ROWS = 300
"""Of a lab's table on the page; the link to its CSV has all."""
ORDER = ["row", "machine", "verdict", "ratio", "low", "high", "baseline_s", "time_s"]
MOST_PANELS = 3
PANEL_TITLE_WIDTH = 36  # characters that fit above one panel
COMMON_AXES = ("n_bytes", "sequence", "context_length", "world_size", "bucket_mb", "batch")
MOST_CATEGORIES = 8


def load_runs(given: Iterable[str]) -> tuple[list[Run], dict[str, str]]:
    """Runs by path or name, or all runs below a folder and those that the pages of reports below it were made of.

    Beside the runs, the files that could not be read and why: a run that was killed at once must not hide the others.
    RunFileError for a name that no run has, and if these files leave less than two runs; ParameterError for a folder
    that holds neither a run nor a page.
    """
    runs: dict[Path, Run] = {}
    unread: dict[str, str] = {}
    for text in given:
        if kind_of_path(text) == "folder":
            paths = _runs_in(Path(text), unread)
        else:
            folders = [folder for parent in (recorded_directory(), runs_directory()) for folder in parent.glob("*/")]
            paths = [find_run(folders, text)]
        for path in paths:
            try:
                runs.setdefault(path.resolve(), Run.load(path))
            except RunFileError as error:
                unread[str(path)] = str(error).removeprefix(str(path)).lstrip(":, ")
    if unread and len(runs) < 2:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in unread.items())
        raise RunFileError(f"expected at least two runs, {len(runs)} can be read: {reasons}")
    return list(runs.values()), unread


def _runs_in(folder: Path, unread: dict[str, str]) -> list[Path]:
    """Run files below a folder, and the runs of the pages below it; pages without theirs are added to `unread`."""
    found = sorted(folder.rglob("*.jsonl"))
    names, pages = {path.name for path in found}, 0
    for path in sorted(folder.rglob("*.html")):
        page = read_page(path)
        if page is None:
            continue
        pages += 1
        if page["record"] is None:
            unread[str(path)] = page["error"] or "it names no run"
            continue
        named = Path(page["record"]["run"])
        if named.name in names:
            continue
        # a page names its run from the checkout on that it was made in, which may have been copied here as a whole
        places = [*(parent / named for parent in path.resolve().parents), project_root() / named, shipped() / named]
        run = next((place for place in places if place.is_file()), None)
        if run is None:
            unread[str(path)] = f"its run is not here: {named}"
        else:
            found.append(run)
    if not found and not pages:
        raise ParameterError(f"expected a folder with runs (*.jsonl) or a report, got {folder}: it holds no run")
    return found


def write_comparison(
    comparisons: Sequence[LabComparison], command: str, page: Path, unread: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """Write the page, which lists what could not be read; returns its first table, one row per (machine, lab)."""
    table = overview(comparisons)
    html = render(
        "compare_page.html.j2",
        style=style_sheet(),
        script=script(),
        command=command,
        unknown_percent=f"{100 * UNKNOWN_REPEAT_DIFFERENCE:.0f}",
        overview=cards.table(
            table, "Every run against the first one of its lab, in ratios of times: below 1 is faster."
        ).data,
        unread=dict(unread or {}),
        labs=[_lab(found) for found in comparisons],
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(html, encoding="utf-8")
    return table


def _lab(found: LabComparison) -> dict[str, Any]:
    ordered = found.rows[[*ORDER, *found.settings]].rename(columns={"row": "setting"})  # as on the axis of the figures
    return {
        "name": found.lab,
        "baseline": found.baseline,
        "runs": cards.table(_run_table(found), "Runs, the first one is what the others are compared with.").data,
        "constant": ", ".join(_named(name, value) for name, value in found.constant.items()),
        "repeat_percent": None if found.repeat_difference is None else f"{100 * found.repeat_difference:.0f}",
        "figures": [_figure(found, name, plot, drawn) for name, plot, drawn in _plots(found)],
        "rows": cards.table(ordered.head(MOST_ROWS), f"{len(ordered)} comparisons of shared settings").data,
        "left_out": max(0, len(ordered) - MOST_ROWS),
        "csv": base64.b64encode(ordered.to_csv(index=False).encode()).decode(),
        "not_shared": [
            {"machine": name, "count": len(keys), "examples": keys[:5]}
            for name, keys in found.not_shared.items()
            if keys
        ],
    }


def _run_table(found: LabComparison) -> pd.DataFrame:
    rows = [
        {
            "machine": name,
            "host": run.header.machine.host,
            "source": ", then ".join(str(source or "not recorded") for source in run.sources),
            "torch": run.header.machine.versions.get("torch"),
            "profile": run.header.profile,
            "started": f"{run.header.started:%Y-%m-%d %H:%M}",
            "run": relative_to_project(run.path),
        }
        for name, run in found.runs.items()
    ]
    return pd.DataFrame(rows)


def _figure(found: LabComparison, name: str, plot: Plot, drawn: str) -> str:
    for text in plot.figure.findobj(Text):
        if "$" in text.get_text():  # in a name that a run holds: nothing to be typeset
            text.set_parse_math(False)
    return cards.figure_on_page(plot, drawn, f"compare_{found.lab}_{name}", drawn)


def _plots(found: LabComparison) -> Iterator[tuple[str, Plot, str]]:
    """All ratios in one figure, and times of a few settings, one line (or bar) a machine."""
    if found.rows.empty:
        return
    machines = list(found.runs)
    ratios = found.rows.rename(columns={"row": "setting"})
    plot = lines(ratios, x="setting", y="ratio", hue="machine", hue_order=machines, level=1, log="y")
    told = "Settings are numbered as in the table below and its CSV."
    yield "ratios", plot, f"Time over that of {found.baseline}, setting by setting; below 1 is faster. {told}"
    x = _axis(found)
    if x is None:
        drawn = f"Median times with their intervals, of the first settings. {told}"
        yield "times", _bars(found, machines), drawn
        return
    others = [name for name in found.settings if name != x]
    table = found.medians.assign(panel=labels(found.medians, others))
    wide = _widest(table, x)
    some = table[table["panel"].isin(wide.index[:MOST_PANELS])]
    differing = [name for name in others if some[name].astype(str).nunique() > 1]
    first = some.iloc[0]
    same = ", ".join(_named(name, first[name]) for name in others if name not in differing and pd.notna(first[name]))
    titles = ["\n".join(wrap(text, PANEL_TITLE_WIDTH)) for text in labels(some, differing)]
    plot = lines(
        some.assign(panel=titles), x=x, y="seconds", hue="machine", hue_order=machines, facet="panel", log="xy"
    )
    drawn = f"Median times with their intervals: {min(MOST_PANELS, len(wide))} of {len(wide)} series"
    yield "times", plot, f"{drawn}, all of {same}." if same else f"{drawn}."


def _widest(table: pd.DataFrame, x: str) -> pd.Series:
    """How many values of `x` each panel has, the most first."""
    return table.groupby("panel", sort=False)[x].nunique().sort_values(ascending=False, kind="stable")


def _axis(found: LabComparison) -> str | None:
    """The number above zero of which one series of settings has most values; usual axes first."""
    best, most = None, 1
    for name in sorted(found.settings, key=lambda name: (name not in COMMON_AXES, name)):
        values = pd.to_numeric(found.medians[name], errors="coerce")
        if values.notna().all() and (values > 0).all():
            others = [other for other in found.settings if other != name]
            count = int(_widest(found.medians.assign(panel=labels(found.medians, others)), name).iloc[0])
            best, most = (name, count) if count > most else (best, most)
    return best


def _bars(found: LabComparison, machines: list[str]) -> Plot:
    rows = sorted(set(found.medians["row"]))[:MOST_CATEGORIES]
    some = found.medians[found.medians["row"].isin(rows)]
    some = some.assign(setting=some["row"].astype(str))
    order = [str(row) for row in rows]
    return bars(some, x="setting", y="seconds", hue="machine", x_order=order, hue_order=machines, log=True)


def _named(name: str, value: Any) -> str:
    """ "scheduling batch", "4 ranks", "64 KiB": of a list without headings, in which a word alone says nothing."""
    return f"{name.replace('_', ' ')} {label(name, value)}" if isinstance(value, str) else label(name, value)
