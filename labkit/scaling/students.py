"""Published runs of two to four GPUs in a room, by students: a sweep of gradient buckets, and sharding, predicted.

Their products are in float32, which no tensor core computes and whose elements are twice as long: as half of every
bandwidth, at the rate of the other units. What a constant counts in bytes is halved, for it is as long as it was. Their
attention writes its scores to memory, and AdamW keeps 28 bytes a parameter moving. Their sharded optimizer all-reduces
gradients as DDP does, and then broadcasts what each rank has updated. The GPU is assumed: H100s, linked by NVLink but
where their author measured the link.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_uppercase

from labkit.scaling.communication import group
from labkit.scaling.compute import BF16
from labkit.scaling.constants import Constants, Profile, load_constants
from labkit.scaling.hardware import Hardware, find_hardware
from labkit.scaling.layout import Layout
from labkit.scaling.model import Model, parameters
from labkit.scaling.named_models import find_model
from labkit.scaling.prediction import Prediction, predict
from labkit.scaling.runs import Run, Runs

MB = 2**20
FLOAT32_TFLOPS = 66.9
"""NVIDIA H100 datasheet (2023): float32 outside the tensor cores."""
ADAMW_BYTES = 28.0
TENSORS_PER_LAYER = 9
SMOLLM3 = Model(layers=36, hidden=2048, heads=16, kv_heads=4, ffn=11008, vocab=128256, tied=True, name="SmolLM3-3B")
"""config.json as published."""
SHARDS = {"ZeRO-2": "zero2", "ZeRO-3": "zero3"}
SHARDED_OPTIMIZER = "sharded_optimizer"
GPU = "h100"
LINKED = "damek/cs336-assignment2-systems"
"""The author of the bucket sweep and of a write-up, who measured what the link of the two GPUs moves."""
LINK_GB_S = 1000 * MB / 50.78e-3 / 1e9
"""All-reduce of 1000 MiB, outputs/distributed_communication_single_node.md. NVLink moves 16 times as much."""


@dataclass(frozen=True)
class StudentRun:
    """A step that was published, and its prediction; `bucket_mb` where the sweep names one."""

    source: str
    """The bucket sweep, or a write-up: no names of people."""
    setting: str
    variant: str
    bucket_mb: float | None
    measured_s: float
    predicted: Prediction


def student_runs(directory: Path) -> Iterator[StudentRun]:
    """Every timed GPU run in `directory`, `data/reference`; ranks that are CPUs are no hardware of this package."""
    yield from _bucket_sweep(directory / "ddp_bucketed_xl_2gpu.csv")
    yield from _sharded(directory / "sharded_training_2gpu.csv")


def _bucket_sweep(path: Path) -> Iterator[StudentRun]:
    model = find_model("xl")
    for row in _rows(path):
        batch, tokens, bucket_mb = int(row["local_batch"]), int(row["seq_len"]), float(row["bucket_mb"])
        layout = Layout(dp=2, micro_batch=batch, global_batch=2 * batch)
        predicted = _in_float32(model, layout, tokens, bucket_mb * MB, is_linked=True)
        setting = f"batch {batch}, {tokens} tokens"
        yield StudentRun("bucket sweep", setting, f"{bucket_mb:g} MB", bucket_mb, float(row["step_s"]), predicted)


def _sharded(path: Path) -> Iterator[StudentRun]:
    rows = [row for row in _rows(path) if "gloo" not in row["hardware"] and row["step_ms"]]
    sources = dict(zip(dict.fromkeys(row["source"] for row in rows), ascii_uppercase, strict=False))
    for row in rows:
        shard = next((name for words, name in SHARDS.items() if words in row["variant"]), "none")
        source, tokens = f"write-up {sources[row['source']]}", int(row["seq_len"])
        if row["precision"] == "bf16":  # its tokens/s times its step are one sequence a GPU
            layout = Layout(dp=4, micro_batch=1, global_batch=4, shard=shard)
            predicted, setting = predict(SMOLLM3, find_hardware(GPU), layout, seq_len=tokens), f"{tokens} tokens"
        else:
            batch = int(row["global_batch"])
            layout = Layout(dp=2, micro_batch=batch // 2, global_batch=batch, shard=shard)
            is_sharded, is_linked = SHARDED_OPTIMIZER in row["variant"], row["source"].startswith(LINKED)
            predicted = _in_float32(find_model("xl"), layout, tokens, 25 * MB, is_linked, is_sharded)
            setting = f"batch {batch // 2}, {tokens} tokens"
        yield StudentRun(source, setting, row["variant"], None, float(row["step_ms"]) / 1000, predicted)


def _in_float32(
    model: Model, layout: Layout, seq_len: int, bucket_bytes: float, is_linked: bool, shards_optimizer: bool = False
) -> Prediction:
    constants = load_constants()
    whole = 4.0 * parameters(model) / (TENSORS_PER_LAYER * model.layers)  # a bucket holds whole tensors
    bytes_of = {
        "gradient_bytes": 4.0, "optimizer_traffic": ADAMW_BYTES, "bucket_bytes": max(bucket_bytes, whole),
        "loss_traffic": constants.table["loss_traffic"]["default"],
    }  # fmt: skip
    profile = Profile(
        "in float32", "generic", {name: value / 2 for name, value in bytes_of.items()} | {"unfused_attention": 1.0}
    )
    hardware = find_hardware(GPU)
    if is_linked:  # a declared rate, of which NCCL reaches a share
        hardware = replace(hardware, link_gb_s=LINK_GB_S / constants.table["link_efficiency"]["default"])
    run = Run(model, _at_half(hardware), layout, seq_len, profile.name)
    unseen = _unseen(constants, profile)
    found = predict(run.model, run.hardware, layout, seq_len=seq_len, framework=run.framework, constants=unseen)
    return _with_broadcasts(found, run, unseen) if shards_optimizer else found


def _with_broadcasts(found: Prediction, run: Run, constants: Constants) -> Prediction:
    """`found` with each rank updating its share, and sending it to the others, a tensor at a time, once it has.

    A broadcast passes the whole of a tensor over each link of the ring (nccl-tests, PERFORMANCE.md): with the
    gradients' all-reduce, three times the parameters (arXiv:1910.02054, section 7, counts two for reduce-scatter and
    gather). Nothing hides it: the next forward pass waits.
    """
    runs, ranks = Runs.of([run]), run.layout.dp
    rows = constants.rows(runs)
    around = group(runs, rows, runs.dp, runs.tp)
    calls = TENSORS_PER_LAYER * run.model.layers
    call_s = rows["nccl_call_s"] * (1 + rows["nccl_rank_share"] * ranks) / 2
    sending = float((calls * call_s + BF16 * parameters(run.model) / around.bytes_per_s)[0])
    optimizer = found.parts_s["optimizer_s"] / ranks
    parts = {**found.parts_s, "optimizer_s": optimizer, "gather_s": found.parts_s["gather_s"] + sending}
    longer = sum(parts.values()) / found.step_s
    low_80, high_80, low_90, high_90 = (longer * end for end in (*found.interval_80, *found.interval_90))
    return replace(
        found,
        step_s=longer * found.step_s,
        interval_80=(low_80, high_80),
        interval_90=(low_90, high_90),
        parts_s=parts,
        mfu=found.mfu / longer,
        tokens_per_s=found.tokens_per_s / longer,
    )


def _unseen(constants: Constants, profile: Profile) -> Constants:
    """With the intervals of a framework that was never seen: nothing was calibrated."""
    known = constants.with_profile(profile)
    return replace(known, residuals={**known.residuals, profile.name: constants.residuals["never seen"]})


def _at_half(hardware: Hardware) -> Hardware:
    return replace(
        hardware,
        peak_tflops=FLOAT32_TFLOPS,
        memory_gb_s=hardware.memory_gb_s / 2,
        link_gb_s=hardware.link_gb_s / 2,
        network_gbps=hardware.network_gbps / 2,
    )


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))
