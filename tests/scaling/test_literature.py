"""Cases that papers and books work out by hand, to one percent or better."""

import csv

import numpy as np
import pytest

from labkit.scaling import communication, memory, pipeline
from labkit.scaling.communication import group
from labkit.scaling.compute import product_s
from labkit.scaling.constants import load_constants
from labkit.scaling.model import Model, parameters, step_flops
from labkit.scaling.runs import Runs
from tests.scaling.conftest import DATA, LLAMA_8B, LLAMA_70B, ideal_constants, run

GIB = 2**30


def _gpt(layers, hidden, heads):
    return Model(layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocab=51200, ffn_gated=False, tied=True)


# arXiv:2205.05198, table 3: layers, hidden, heads; sequences of a micro-batch; interleaved chunks
KORTHIKANTI = {
    "megatron-22B": (_gpt(48, 6144, 64), 4, 1),
    "gpt3-175B": (_gpt(96, 12288, 96), 1, 3),
    "turing-530B": (_gpt(105, 20480, 128), 1, 3),
    "megatron-1T": (_gpt(128, 25600, 160), 1, 1),
}


@pytest.mark.parametrize("row", list(csv.DictReader((DATA / "activation_memory.csv").open())), ids=lambda row: str(row))
def test_activations_of_korthikanti_et_al(row):
    model, micro_batch, vp = KORTHIKANTI[row["model"]]
    pp, small = int(row["pp"]), row["mode"] == "seqsel"
    runs = Runs.of(
        [
            run(
                model,
                "a100",
                seq_len=2048,
                framework="megatron",
                tp=8,
                pp=pp,
                vp=vp,
                micro_batch=micro_batch,
                global_batch=micro_batch * pp,
                sequence_parallel=small,
                recompute="selective" if small else "none",
            )
        ]
    )
    kept, again = memory.layer_activations(runs, np.ones(1), np.zeros(1))
    first_stage = kept * pipeline.layers_per_stage(runs)[:, 0] * memory.micro_batches_alive(runs)[:, 0]
    assert first_stage[0] / GIB == pytest.approx(float(row["activations_gib"]), rel=1e-4)
    assert again[0] == 0
    matrices = 18 * 12 * model.layers * model.hidden**2 / (8 * pp)
    assert matrices / GIB == pytest.approx(float(row["params_optimizer_gib"]), rel=1e-4)


@pytest.mark.parametrize(
    ("shard", "gigabytes"), [("none", 120.0), ("zero1", 31.4), ("zero2", 16.6)], ids=lambda value: str(value)
)
def test_states_of_a_7b5_model_on_64_gpus(shard, gigabytes):
    """ZeRO, arXiv:1910.02054, figure 1: 2 bytes of weights, 2 of gradients, 12 of optimizer a parameter."""
    model = Model(layers=37, hidden=4096, heads=32, ffn=16384, vocab=1000, ffn_gated=False, tied=True)
    runs = Runs.of([run(model, framework="mosaic", dp=64, global_batch=64, shard=shard)])
    stages = memory.stages(runs, load_constants().rows(runs))
    held = sum(stages.parts[name][0, 0] for name in ("parameters", "gradients", "optimizer"))
    assert held * 7.5e9 / parameters(model_columns(model)) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def model_columns(model):
    return Runs.of([run(model)])


def test_flops_of_megatron():
    """arXiv:2104.04473, equation 3 without recomputation: 72 B S L h^2 (1 + S/6h + V/12Lh)."""
    model, batch, s = _gpt(96, 12288, 96), 1536, 2048
    h, layers, v = model.hidden, model.layers, model.vocab
    expected = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert step_flops(model_columns(model), seq_len=s, sequences=batch)[0] == pytest.approx(expected, rel=1e-6)


def test_llama_3_70b_on_15_trillion_tokens():
    """The scaling book, "Training LLaMA 3": 70.5e9 parameters, 6.3e24 FLOPs, 44 days on 8960 chips of 459 TFLOP/s."""
    columns = model_columns(LLAMA_70B)
    assert parameters(columns)[0] == pytest.approx(70.5e9, rel=0.01)
    tokens = 15e12
    flops = step_flops(columns, seq_len=1, sequences=tokens)[0]
    without_embedding = 6 * (parameters(columns)[0] - LLAMA_70B.vocab * LLAMA_70B.hidden) * tokens
    assert flops == pytest.approx(without_embedding, rel=0.01)
    days = 6 * parameters(columns)[0] * tokens / (8960 * 4.59e14 * 0.4) / 86400
    assert days == pytest.approx(44, rel=0.02)


def test_data_parallelism_is_bound_by_communication_below_peak_over_bandwidth():
    """The scaling book, "Training": an all-reduce of gradients hides only above C/W tokens a chip.

    A matrix takes 4 T n k FLOPs backward, and its bf16 gradient 4 n k bytes over the link (reduce, then gather).
    """
    constants, n = ideal_constants(), 8192.0
    one = run(LLAMA_8B, "h100", dp=8, global_batch=8)
    rows = constants.rows(runs := Runs.of([one]))
    critical = one.hardware.peak_tflops * 1e12 / (one.hardware.link_gb_s * 1e9)
    size = np.array([n])
    compute = 2 * product_s(runs, rows, np.array([critical]), size, size)
    ring = group(runs, rows, np.array([8.0]), np.ones(1))
    reduced = communication.all_reduce_s(ring, rows, 2 * size * size)
    assert reduced[0] == pytest.approx(compute[0] * 7 / 8, rel=0.01)  # (n-1)/n of a ring of eight


def test_bubbles_of_the_pipeline_schedules():
    """arXiv:2104.04473, section 2.2: (p-1)/m of the ideal time, 1/v of that interleaved; here p = 64, m = 512."""
    runs = Runs.of(
        [
            run(_gpt(128, 25600, 160), "a100", tp=8, pp=64, vp=vp, global_batch=512, framework="megatron")
            for vp in (1, 2)
        ]
    )
    ideal, bubble = pipeline.schedule_s(runs, np.ones((2, 64)))
    assert bubble / ideal == pytest.approx([63 / 512, 63 / 1024])


def test_nccl_in_a_node_of_a100():
    """nccl-tests' all-reduce of 1 MB to 1 GB: the median error is 5 %."""
    rows = [row for row in csv.DictReader((DATA / "nccl_all_reduce_in_a_node.csv").open()) if row["gpu"] == "a100"]
    runs = Runs.of([run(gpu="a100", dp=int(row["ranks"]), global_batch=840) for row in rows])
    constants = load_constants().rows(runs)
    ring = group(runs, constants, runs.dp, np.ones(len(runs)))
    predicted = communication.all_reduce_s(ring, constants, np.array([float(row["bytes"]) for row in rows]))
    measured = np.array([float(row["out_of_place_ns"]) for row in rows]) * 1e-9
    assert np.median(np.abs(predicted / measured - 1)) < 0.06
