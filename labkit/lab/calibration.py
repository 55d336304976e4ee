"""The calibration of a machine, from a run of the lab `limits`."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pandas as pd

from labkit.costs import calibration as costs
from labkit.costs.calibration import ALL_REDUCE, BURST, DOUBLING, IN_A_ROW, MESSAGE, ROW
from labkit.costs.communication import MessageCost, fit_alpha_beta, recursive_doubling
from labkit.lab.metric import Metric
from labkit.lab.project import runs_directory
from labkit.lab.runs.store import Run, newest_runs
from labkit.machine.description import Machine

LIMITS = "limits"
# A run within a day of it predicts without calibrating again, which takes 15 seconds.
FRESH = timedelta(days=1)
# Rows that the largest matrices need: smaller products measure the cost of their calls.
LEAST_ROWS = 512
PRODUCTS = Metric(
    "seconds", "shape", ("device", "dtype", "flops"), where={"sweep": "products", "world_size": 1}
)
MEMORY = Metric(
    "seconds",
    "operation",
    ("device", "n_bytes", "bytes"),
    where={"sweep": "memory", "world_size": 1},
)
EXCHANGE = Metric("seconds", "way", ("world_size", "what", "n_bytes"), where={"sweep": "exchange"})
CHAINS = Metric("seconds", "operators", ("device",), where={"sweep": "autograd", "world_size": 1})
NEW = "new"  # operation of the sweep "memory"


def calibrate_machine(run: Run) -> costs.Calibration | None:
    """Calibrate a machine from its limits run; None without rates of one rank."""
    frame = run.frame()
    rates = tuple(_rates(frame))
    if not rates:  # all predictions need them
        return None
    return costs.Calibration(
        run=run.name,
        measured=run.header.started,
        machine=run.header.machine.label,
        rates=rates,
        transports=tuple(transports(frame)),
        source=str(run.header.machine.source),
    )


def newest_calibration(
    machine: Machine, within: timedelta | None = None
) -> costs.Calibration | None:
    """Return the calibration by this machine's newest usable run `within` a time, or None."""
    for run in newest_runs(runs_directory() / LIMITS):
        # The runs before it are older still.
        if within is not None and datetime.now(UTC) - run.header.started > within:
            break
        if not _is_usable(run, machine):
            continue
        calibration = calibrate_machine(run)
        if calibration is not None and calibration.rates_on(machine.device("auto")):
            return replace(calibration, is_disturbed=bool(run.busy))
    return None


def describe_calibration(run: Run) -> str:
    """Name the calibration behind a run's predictions, and whether it was disturbed."""
    calibration = run.header.calibration
    if calibration is None:
        return "nothing: the machine was not calibrated (labkit measure limits)"
    text = (
        f"the limits of {calibration.machine}, measured {calibration.measured:%Y-%m-%d %H:%M} UTC:"
        f" {calibration.run}"
    )
    if calibration.is_disturbed:
        text += "; the machine was busy for part of that: predictions may be too long"
    return text


def _is_usable(run: Run, machine: Machine) -> bool:
    """Return whether predictions may use a run: complete, of this machine, and large enough."""
    measured = run.header.machine
    # Rates depend on the cores that a container gives, and on torch's kernels.
    if measured.identity != machine.identity or measured.cores != machine.cores:
        return False
    if measured.versions.get("torch") != machine.versions.get("torch"):
        return False
    if run.pending or run.header.profile == "smoke":
        return False
    planned = run.header.planned.values()
    for point in planned:
        is_of_one_rank = point.get("sweep") == "products" and point.get("world_size") == 1
        if is_of_one_rank and max(point.get("sizes") or [0]) < LEAST_ROWS:
            return False
    # A run of products alone would leave all predictions of communication out.
    return any(point.get("sweep") == "exchange" for point in planned)


def _rates(frame: pd.DataFrame) -> Iterator[costs.Rates]:
    """Yield the rates of each device for which products and additions were measured."""
    products = _least(PRODUCTS, frame)
    memory = _least(MEMORY, frame)
    products = products[products["shape"].str.startswith("square")]
    for device, squares in products.groupby("device"):
        of_device = memory[memory["device"] == device]
        # Into new memory, as the operators of a training write their results.
        additions = _curve(of_device[of_device["operation"] == NEW], "bytes")
        if additions:
            curves = {
                str(dtype): _faster_with_size(rows) for dtype, rows in squares.groupby("dtype")
            }
            yield costs.Rates(
                device=str(device),
                products=curves,
                additions=additions,
                autograd=autograd(frame[frame["device"] == device]),
            )


def autograd(frame: pd.DataFrame) -> costs.Autograd | None:
    """Fit the cost of autograd on one device, from chains of few and many operators, or None."""
    # Medians count, not minima: passes in training run after others, too.
    table = CHAINS.medians(frame).sort_values("operators")
    if len(table) < 2:
        return None
    ends = table[["operators", "seconds"]].iloc[[0, -1]]
    (few, short_s), (many, long_s) = ends.to_numpy(dtype=float)
    operator_s = max(0.0, (long_s - short_s) / (many - few))
    return costs.Autograd(begin_s=max(0.0, short_s - few * operator_s), operator_s=operator_s)


def _least(metric: Metric, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the shortest of the repeats: other programs only add to the time of a rank."""
    return metric.samples(frame).groupby(metric.columns, as_index=False)["seconds"].min()


def _curve(table: pd.DataFrame, work: str) -> costs.Curve:
    """Return (work, seconds) by size."""
    ordered = table.sort_values(work)
    # If something larger took less time, which is noise, its time holds for both.
    seconds = ordered["seconds"][::-1].cummin()[::-1]
    return tuple(zip(ordered[work].astype(float), seconds.astype(float), strict=True))


def _faster_with_size(table: pd.DataFrame) -> costs.Curve:
    """Return (FLOPs, seconds) of square products."""
    ordered = table.sort_values("flops")
    flops = ordered["flops"].astype(float)
    # A rate below that of smaller products is a disturbance.
    rate = (flops / ordered["seconds"]).cummax()
    return tuple(zip(flops, flops / rate, strict=True))


def transports(frame: pd.DataFrame) -> Iterator[costs.Transport]:
    """Fit alpha and beta of all-reduces and messages by transport and number of ranks."""
    for (way, ranks), table in EXCHANGE.medians(frame).groupby(["way", "world_size"]):
        by_size = table.pivot_table(index="n_bytes", columns="what", values="seconds")
        if {ALL_REDUCE, MESSAGE, ROW, BURST, DOUBLING} - set(by_size) or len(by_size.dropna()) < 2:
            continue
        by_size = by_size.dropna()
        # Of messages in a row only the first pays for the call, so the others cost what each adds.
        message = (by_size[ROW] - by_size[MESSAGE]) / (IN_A_ROW - 1)
        # Noise may make a row shorter than one message; it cannot be free.
        message = message.clip(lower=by_size[MESSAGE] / IN_A_ROW)
        # A call: what the shortest all-reduce by recursive doubling takes besides its messages.
        rounds = recursive_doubling(int(ranks), 0).messages
        call_s = max(0.0, float((by_size[DOUBLING] - rounds * message).iloc[0]))
        burst = (by_size[BURST] - (by_size[MESSAGE] - message).clip(lower=0)).clip(lower=message)
        for what, seconds, sent, call in (
            (ALL_REDUCE, by_size[ALL_REDUCE], 1, 0.0),
            (MESSAGE, message, 1, call_s),
            (BURST, burst, ranks - 1, call_s),
        ):
            messages = [MessageCost(1, sent * n) for n in by_size.index]
            alpha_s, beta_s = fit_alpha_beta(messages, seconds.tolist())
            costs_s = {"alpha_s": alpha_s, "beta_s_per_byte": beta_s, "call_s": call}
            yield costs.Transport(way=str(way), what=what, ranks=int(ranks), **costs_s)
