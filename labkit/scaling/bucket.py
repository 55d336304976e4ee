"""The best number of gradient bytes per message."""

from labkit.costs.communication import AlphaBeta, best_buckets
from labkit.scaling import compute
from labkit.scaling.communication import all_reduce_s, group
from labkit.scaling.constants import Constants
from labkit.scaling.runs import Run, Runs
from labkit.scaling.step_time import rank_parameters


def bucket_bytes(run: Run, constants: Constants) -> float | None:
    """The bucket with the least exposed time (`labkit.costs.communication.best_buckets`).

    None without data parallelism; a layer if parameters are sharded.
    """
    runs = Runs.from_runs([run])
    rows = constants.rows(runs)
    if run.layout.dp * run.layout.cp == 1:
        return None
    if run.layout.shard in ("zero3", "hsdp"):
        return float((compute.BF16 * runs.layer_parameters / runs.tp)[0])
    ranks = group(runs, rows, runs.dp * runs.cp, runs.tp)
    n_bytes = rank_parameters(runs) * rows["gradient_bytes"]
    call_s = float(all_reduce_s(ranks, rows, 0 * n_bytes)[0])
    whole_s, total = float(all_reduce_s(ranks, rows, n_bytes)[0]), float(n_bytes[0])
    return total / best_buckets(total, AlphaBeta(call_s, (whole_s - call_s) / total))
