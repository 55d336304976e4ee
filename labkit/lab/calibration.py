"""The calibration of a machine from a run of the lab `limits`, and the newest one of this machine."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pandas as pd

from labkit.costs.calibration import ALL_REDUCE, BURST, DOUBLING, IN_A_ROW, MESSAGE, ROW, Calibration, Transport
from labkit.costs.communication import MessageCost, fit_alpha_beta, recursive_doubling
from labkit.lab.metric import Metric
from labkit.lab.project import runs_directory
from labkit.lab.runs.store import Run, newest_runs
from labkit.machine.description import Machine

LIMITS = "limits"
FRESH = timedelta(days=1)
EXCHANGE = Metric("seconds", "way", ("world_size", "what", "n_bytes"), where={"sweep": "exchange"})


def calibrate_machine(run: Run) -> Calibration | None:
    """Calibrate a machine from its limits run; None if the run lacks messages between ranks."""
    measured = tuple(transports(run.frame()))
    if not measured:
        return None
    return Calibration(
        run=run.name,
        measured=run.header.started,
        machine=run.header.machine.label,
        cores=run.header.machine.cores,
        transports=measured,
        source=str(run.header.machine.source),
    )


def newest_calibration(machine: Machine, within: timedelta | None = None) -> Calibration | None:
    """The calibration from the newest complete limits run of this machine, at most `within` old, and not at `smoke`."""
    for run in newest_runs(runs_directory() / LIMITS):
        if within is not None and datetime.now(UTC) - run.header.started > within:
            break
        if run.pending or run.header.profile == "smoke" or not _is_same_machine(run.header.machine, machine):
            continue
        if (calibration := calibrate_machine(run)) is not None:
            return replace(calibration, is_disturbed=bool(run.busy))
    return None


def describe_calibration(run: Run) -> str:
    """Name the calibration behind a run's predictions, and whether the machine was disturbed then."""
    calibration = run.header.calibration
    if calibration is None:
        return "nothing: the machine was not calibrated (labkit measure limits)"
    text = f"the limits of {calibration.machine}, measured {calibration.measured:%Y-%m-%d %H:%M} UTC: {calibration.run}"
    if calibration.is_disturbed:
        text += ", while the machine was slow or busy for a part: predictions may be too long"
    return text


def _is_same_machine(theirs: Machine, here: Machine) -> bool:
    """Return whether cores and torch are the same, too: other ones multiply at another rate."""
    one, other = ([*each.identity, each.cores, each.versions.get("torch")] for each in (theirs, here))
    return one == other


def transports(frame: pd.DataFrame) -> Iterator[Transport]:
    """Fit alpha and beta of every transport and number of ranks: all-reduce, messages in a row, messages at once.

    The cost of a call is the time of the shortest all-reduce by recursive doubling minus that of its messages.
    """
    for (way, ranks), table in EXCHANGE.medians(frame).groupby(["way", "world_size"]):
        by_size = table.pivot_table(index="n_bytes", columns="what", values="seconds")
        if {ALL_REDUCE, MESSAGE, ROW, BURST, DOUBLING} - set(by_size) or len(by_size.dropna()) < 2:
            continue
        by_size = by_size.dropna()
        message = ((by_size[ROW] - by_size[MESSAGE]) / (IN_A_ROW - 1)).clip(lower=by_size[MESSAGE] / IN_A_ROW)
        rounds = recursive_doubling(int(ranks), 0).messages
        call_s = max(0.0, float((by_size[DOUBLING] - rounds * message).iloc[0]))
        burst = (by_size[BURST] - (by_size[MESSAGE] - message).clip(lower=0)).clip(lower=message)
        for what, seconds, sent, call in (
            (ALL_REDUCE, by_size[ALL_REDUCE], 1, 0.0),
            (MESSAGE, message, 1, call_s),
            (BURST, burst, ranks - 1, call_s),
        ):
            costs = [MessageCost(1, sent * n) for n in by_size.index]
            alpha_s, beta_s = fit_alpha_beta(costs, seconds.tolist())
            costs_s = {"alpha_s": alpha_s, "beta_s_per_byte": beta_s, "call_s": call}
            yield Transport(way=str(way), what=what, ranks=int(ranks), **costs_s)
