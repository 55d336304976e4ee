"""Cases that papers and books work out by hand, to one percent or better."""

import numpy as np
import pytest

from labkit.scaling import memory, read_table
from labkit.scaling.communication import Group
from labkit.scaling.models import Model, step_flops
from labkit.scaling.runs import Runs
from labkit.scaling.step_time import predict_step_s, schedule_s
from tests.scaling.conftest import run

GIB = 2**30


def _gpt(layers, hidden, heads):
    return Model(
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=4 * hidden,
        vocab=51200,
        ffn_gated=False,
        tied=True,
    )


# arXiv:2205.05198, table 3: layers, hidden, heads; sequences of a micro-batch; interleaved chunks
KORTHIKANTI = {
    "megatron-22B": (_gpt(48, 6144, 64), 4, 1),
    "gpt3-175B": (_gpt(96, 12288, 96), 1, 3),
    "turing-530B": (_gpt(105, 20480, 128), 1, 3),
    "megatron-1T": (_gpt(128, 25600, 160), 1, 1),
}


@pytest.mark.parametrize("row", read_table("activation_memory"), ids=str)
def test_activations_of_korthikanti_et_al(row):
    model, micro_batch, vp = KORTHIKANTI[row["model"]]
    pp = int(row["pp"])
    small = row["mode"] == "seqsel"
    layout = {
        "tp": 8,
        "pp": pp,
        "vp": vp,
        "micro_batch": micro_batch,
        "global_batch": micro_batch * pp,
    }
    layout |= {"sequence_parallel": small, "recompute": "selective" if small else "none"}
    runs = Runs([run(model, "a100", seq_len=2048, framework="megatron", **layout)])
    saved, again = memory.layer_activations(runs, np.ones(1), np.zeros(1))
    first_stage = saved * runs.stage_layers[:, 0] * memory.micro_batches_alive(runs)[:, 0]
    assert first_stage[0] / GIB == pytest.approx(float(row["activations_gib"]), rel=1e-4)
    assert again[0] == 0
    matrices = 18 * 12 * model.layers * model.hidden**2 / (8 * pp)
    assert matrices / GIB == pytest.approx(float(row["params_optimizer_gib"]), rel=1e-4)


@pytest.mark.parametrize(
    ("shard", "gigabytes"), [("none", 120.0), ("zero1", 31.4), ("zero2", 16.6)]
)
def test_states_of_a_7b5_model_on_64_gpus(shard, gigabytes):
    """ZeRO, arXiv:1910.02054, figure 1: 2 bytes of weights, 2 of gradients, 12 of optimizer per
    parameter."""
    model = Model(
        layers=37, hidden=4096, heads=32, ffn=16384, vocab=1000, ffn_gated=False, tied=True
    )
    runs = Runs([run(model, framework="mosaic", dp=64, global_batch=64, shard=shard)])
    stages = memory.stage_bytes(runs)
    held = sum(stages[name][0, 0] for name in ("parameters", "gradients", "optimizer"))
    assert held * 7.5e9 / model.parameters / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_heads_of_no_multiple_of_eight_leave_the_tensor_cores():
    """arXiv:2401.14489, section 6: BigScience's 96 heads of 150 took 1.2 to 1.4 times as long as 64
    of 224."""
    layout = {
        "tp": 8,
        "pp": 12,
        "dp": 4,
        "global_batch": 2048,
        "micro_batch": 2,
        "recompute": "full",
        "shard": "zero1",
    }
    shapes = [_gpt(72, 14400, 96), _gpt(72, 14336, 64)]
    runs = Runs(
        [run(model, "a100", seq_len=2048, framework="vtrain", **layout) for model in shapes]
    )
    unaligned, aligned = predict_step_s(runs)
    assert 1.2 <= unaligned / aligned <= 1.5


def test_flops_of_megatron():
    """arXiv:2104.04473, equation 3 without recomputation: 72 B S L h^2 (1 + S/6h + V/12Lh)."""
    model = _gpt(96, 12288, 96)
    batch = 1536
    s = 2048
    h = model.hidden
    layers = model.layers
    v = model.vocab
    expected = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert step_flops(model, seq_len=s, sequences=batch) == pytest.approx(expected, rel=1e-6)


def test_bubbles_of_the_pipeline_schedules():
    """arXiv:2104.04473, section 2.2: (p-1)/m of the ideal time, 1/v of that interleaved; here p =
    64, m = 512."""
    layout = {"tp": 8, "pp": 64, "global_batch": 512, "framework": "megatron"}
    runs = Runs([run(_gpt(128, 25600, 160), "a100", vp=vp, **layout) for vp in (1, 2)])
    ideal, bubble = schedule_s(runs, np.ones((2, 64)))
    assert bubble / ideal == pytest.approx([63 / 512, 63 / 1024])


def test_nccl_in_a_node_of_a100():
    """nccl-tests' all-reduce of 1 MB to 1 GB: the median error is 5%."""
    rows = [row for row in read_table("nccl_all_reduce_in_a_node") if row["gpu"] == "a100"]
    runs = Runs([run(gpu="a100", dp=int(row["ranks"]), global_batch=840) for row in rows])
    ring = Group(runs, runs.dp, np.ones(len(runs)))
    predicted = ring.all_reduce_s(np.array([float(row["bytes"]) for row in rows]))
    measured = np.array([float(row["out_of_place_ns"]) for row in rows]) / 1e9
    assert np.median(np.abs(predicted / measured - 1)) < 0.06
