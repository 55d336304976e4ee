"""How many bytes of gradients to send at once."""

from labkit.costs.communication import AlphaBeta, best_buckets
from labkit.scaling import compute
from labkit.scaling.communication import all_reduce_s, group
from labkit.scaling.constants import Constants
from labkit.scaling.runs import Run, Runs
from labkit.scaling.step_time import parameters_of_rank


def bucket_bytes(run: Run, constants: Constants) -> float | None:
    """The bucket that a step waits least for (`labkit.costs.communication.best_buckets`).

    None without data parallelism. Where parameters are sharded, too, what travels at once is a layer.
    """
    runs = Runs.of([run])
    rows = constants.rows(runs)
    if run.layout.dp * run.layout.cp == 1:
        return None
    if run.layout.shard in ("zero3", "hsdp"):
        return float((compute.BF16 * runs.layer_parameters / runs.tp)[0])
    ranks = group(runs, rows, runs.dp * runs.cp, runs.tp)
    n_bytes = parameters_of_rank(runs) * rows["gradient_bytes"]
    call_s = float(all_reduce_s(ranks, rows, 0 * n_bytes)[0])
    whole_s, total = float(all_reduce_s(ranks, rows, n_bytes)[0]), float(n_bytes[0])
    return total / best_buckets(total, AlphaBeta(call_s, (whole_s - call_s) / total))
