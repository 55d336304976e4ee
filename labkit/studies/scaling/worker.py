"""What one rank computes: predictions of published runs beside what was measured, and of trainings nobody published."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.lab.advise import words
from labkit.lab.point import Point
from labkit.lab.project import reference_directory
from labkit.scaling.constants import load_constants
from labkit.scaling.hardware import find_hardware
from labkit.scaling.layout import Layout
from labkit.scaling.model import step_flops
from labkit.scaling.named_models import find_model
from labkit.scaling.paying import KINDS, margins
from labkit.scaling.prediction import is_unstable, predict, predict_runs
from labkit.scaling.published import Published, arrangement, choices, load_published
from labkit.scaling.scoring import folds, interval_90, one_constant_s
from labkit.scaling.search import rank
from labkit.scaling.step_time import PARTS
from labkit.scaling.students import student_runs

DIGITS = 5
MEGATRON = "arXiv:2104.04473 Table 1"
LLAMA = {64: 43.0, 128: 41.0}
"""arXiv:2407.21783, table 4: copies of the model and MFU in percent, 16M tokens a step of 8192-token sequences."""


@dataclass(frozen=True, kw_only=True)
class ScalingPoint(Point):
    """One table of predictions; `sweep` says of what. The others are those of a training of its own."""

    sweep: str
    model: str | None = None
    gpu: str | None = None
    gpus: int | None = None
    sequence: int = 8192
    tokens_per_step: int = 2**24

    def title(self) -> str:
        return f"{self.sweep}, {self.model}, {self.gpus} GPUs" if self.model else self.sweep


def measure_point(point: ScalingPoint) -> Iterator[dict[str, Any]]:
    """Rows of one table; lists are columns, one value per published run."""
    if point.sweep == "training":
        yield from _training(point)
    elif point.sweep == "here":
        yield from _here()
    elif point.sweep == "students":
        yield from _students()
    else:
        tables = {"published": _published, "margins": _margins, "families": _families, "trends": _trends}
        yield from tables[point.sweep](load_published(reference_directory() / "scaling"))


def _columns(rows: NDArray[Any], **columns: NDArray[Any]) -> dict[str, list[Any]]:
    return {name: [_plain(value) for value in values[rows]] for name, values in columns.items()}


def _plain(value: Any) -> Any:
    """As JSON has it: five digits, None for nan."""
    if isinstance(value, np.floating | float):
        return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def _published(published: Published) -> Iterator[dict[str, Any]]:
    """By published table, every timed row: measured, predicted by constants that never saw its model, and rivals."""
    runs, measured, predicted = published.runs, published.step_s, published.model_left_out_s
    constants, fold = load_constants(), folds(published.runs)
    unstable = is_unstable(runs, predict_runs(runs, constants))
    residuals = np.log(measured / predicted)
    low, high = interval_90(runs, fold, residuals, unstable, constants)
    other = predicted * _other_pipeline(published) / predict_runs(runs, constants).step_s
    for group in dict.fromkeys(published.group.tolist()):
        rows = np.flatnonzero((published.group == group) & np.isfinite(measured))
        yield {"group": group} | _columns(
            rows,
            line=published.line,
            of_model=published.model,
            of_gpu=published.gpu,
            of_gpus=runs.gpus.astype(int),
            arrangement=np.array([arrangement(runs, row) for row in range(len(runs))]),
            measured_s=measured,
            predicted_s=predicted,
            low=predicted * np.exp(low),
            high=predicted * np.exp(high),
            framework_left_out_s=published.framework_left_out_s,
            one_constant_s=one_constant_s(runs, published.group, fold, measured),
            unstable=unstable,
            old_pipeline=runs.has("old_pipeline"),
            other_pipeline_s=other,
        )


def _other_pipeline(published: Published) -> NDArray[np.float64]:
    """Seconds of nanotron's rows with its other pipeline engine, before the fix or after it; nan of other rows."""
    runs, options = published.runs, np.empty(len(published.runs), dtype=object)
    options[:] = [one ^ {"old_pipeline"} for one in runs.options]
    found = predict_runs(replace(runs, options=options), load_constants()).step_s
    return np.where(published.group == "nanotron", found, np.nan)


def _margins(published: Published) -> Iterator[dict[str, Any]]:
    """By kind of parallelism, every timed row that uses it: compute over communication, and what it costs the step."""
    constants, timed = load_constants(), np.isfinite(published.step_s)
    found, margin = predict_runs(published.runs, constants), margins(published.runs, constants.rows(published.runs))
    for kind in KINDS:
        rows = np.flatnonzero(timed & np.isfinite(margin[kind.name]))
        exposed = 100 * found.parts_s[kind.part] / found.step_s
        yield {"kind": kind.name} | _columns(rows, margin=margin[kind.name], exposed_percent=exposed)


def _families(published: Published) -> Iterator[dict[str, Any]]:
    """Every family of layouts: how far the proposed ones are behind the best that was measured, in percent."""
    for choice in choices(published):
        first, best, simple = (_percent(one) for one in (choice.behind[0], choice.best_behind, choice.behind_simple))
        yield {
            "group": choice.group, "family": choice.name, "layouts": choice.layouts,
            "best_layout": choice.best, "proposed_layout": choice.first,
            "first_behind_percent": first, "best_of_three_behind_percent": best, "simple_behind_percent": simple,
        }  # fmt: skip


def _percent(share: float) -> float | None:
    """None for what ran out of memory."""
    return _plain(100 * share) if np.isfinite(share) else None


def _here() -> Iterator[dict[str, Any]]:
    """Steps of this machine's ranks. Runs are read with pandas, which other points do without."""
    from labkit.machine import describe_machine
    from labkit.studies.scaling.here import own_ranks

    return own_ranks(describe_machine())


def _students() -> Iterator[dict[str, Any]]:
    """Steps on two to four GPUs, beside their predictions."""
    for run in student_runs(reference_directory()):
        low, high = run.predicted.interval_90
        yield {
            "author": run.source, "setting": run.setting, "variant": run.variant, "bucket_mb": run.bucket_mb,
            "measured_s": run.measured_s, "predicted_s": _plain(run.predicted.step_s), "low": _plain(low),
            "high": _plain(high),
        }  # fmt: skip


def _trends(published: Published) -> Iterator[dict[str, Any]]:
    """MFU by number of GPUs: Megatron's weak scaling, of constants that never saw the model, and Llama 3's 405B."""
    runs = published.runs
    flops = step_flops(runs, seq_len=runs.seq_len, sequences=runs.global_batch)
    at_peak = 100 * flops / (runs.gpus * runs.peak_tflops * 1e12)
    for row in np.flatnonzero(np.char.startswith(published.source, MEGATRON)):
        yield {
            "trend": "Megatron, 1.7B to 1T", "gpus": int(runs.gpus[row]),
            "published_percent": _plain(at_peak[row] / published.step_s[row]),
            "mfu_percent": _plain(at_peak[row] / published.model_left_out_s[row]),
        }  # fmt: skip
    model, hardware = find_model("llama-3-405b"), find_hardware("h100")
    for dp, percent in LLAMA.items():
        layout = Layout(
            tp=8, sequence_parallel=True, pp=16, vp=7, dp=dp, shard="zero1", global_batch=2048
        )  # one layer per chunk; the table does not say
        found = predict(model, hardware, layout, seq_len=8192)
        low, high = (100 * found.mfu * found.step_s / end for end in reversed(found.interval_90))
        yield {
            "trend": "Llama 3, 405B", "gpus": layout.gpus, "published_percent": percent,
            "mfu_percent": _plain(100 * found.mfu), "low": _plain(low), "high": _plain(high),
        }  # fmt: skip


def _training(point: ScalingPoint) -> Iterator[dict[str, Any]]:
    """GPU-seconds of a step by part, on the best layout for so many GPUs; the interval is of the whole."""
    assert point.model is not None
    assert point.gpu is not None
    assert point.gpus is not None
    model, hardware = find_model(point.model), find_hardware(point.gpu)
    batch = max(point.tokens_per_step // point.sequence, 1)
    ranking = rank(model, hardware, point.gpus, seq_len=point.sequence, global_batch=batch)
    if not ranking.order:
        least = ranking.leanest().peak_gib
        yield {"not_measured": f"the smallest layout needs {least:.0f} GiB per GPU", "part": "step"}
        return
    best = ranking.proposed(1)[0]
    hours = point.gpus / 3600 * 1e9 / (batch * point.sequence)
    for part in PARTS:
        yield {"part": part, "gpu_hours": _plain(hours * best.parts_s[part])}
    yield {
        "part": "step", "gpu_hours": _plain(hours * best.step_s), "low": _plain(hours * best.interval_90[0]),
        "high": _plain(hours * best.interval_90[1]), "step_s": _plain(best.step_s),
        "layout": words.arrangement(best.layout),
        "mfu_percent": _plain(100 * best.mfu), "peak_gib": _plain(best.peak_gib),
    }  # fmt: skip
