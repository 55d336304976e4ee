"""Statements of an audited report that were wrong or misleading: rows like theirs, made by hand,
and what the labs' questions answer to them now."""

import numpy as np
import pandas as pd
import pytest

from labkit.lab.metric import Results
from labkit.lab.phrases import find_change
from labkit.lab.wording import advice, headline
from labkit.studies import load_lab
from labkit.studies.attention import worker as attention
from tests.pages.cells import recorded

ROUNDS = 12


def timed(column, ratios, *, noise=0.01, rounds=ROUNDS, seed=0, **about):
    """Rows of a rank: seconds of each alternative in `column`, which takes turns with the
    others."""
    rng = np.random.default_rng(seed)
    return [
        about
        | {
            column: name,
            "rank": 0,
            "repeat": repeat,
            "seconds": ratio * np.exp(rng.normal(0, noise)),
        }
        for name, ratio in ratios.items()
        for repeat in range(rounds)
    ]


def ask(lab, question, rows, **results):
    study = load_lab(lab)
    named = {"alternatives": study.alternatives, "names": study.names}
    return study.question(question).answer(Results(pd.DataFrame(rows), **named, **results))


def test_both_passes_of_attention_count_once():
    """ "A smaller point took 7.54 s": its rounds took 3.78 s. `test_measure` has the limit."""
    point = attention.AttentionPoint(
        implementations=(attention.EXPLICIT,), sequence=16, head_dim=8, batch=1, warmup=0, repeats=2
    )
    timed_rows = [row for row in attention.measure(point) if "seconds" in row]
    is_sum = {row["phase"]: row.get("is_sum") for row in timed_rows}
    assert is_sum == {attention.FORWARD: None, attention.BACKWARD: None, attention.BOTH: True}


def test_a_range_spans_all_that_are_counted():
    """ "3 to 3.4 times faster in 7 of 8": the seven spanned 2.4 to 3.4."""
    rows = []
    for number, times in enumerate([3.4, 3.3, 3.2, 3.1, 3.0, 2.7, 2.4, 1.0]):
        noise = 0.3 if times == 2.4 else 0.01
        pair = {"torch": 1.0, "ring": 1 / times}
        about = {"sweep": "sizes", "backend": "gloo", "world_size": 2, "n_bytes": 1024 << number}
        rows += timed("algorithm", pair, noise=noise, rounds=40, **about)
    answer = ask("all_reduce", "algorithms", rows)
    faster = answer.table[answer.table["verdict"] == "faster"]["ratio"]
    assert answer.counts.better == len(faster) == 7
    first, _, last = find_change(answer).text.split()
    assert float(first) == pytest.approx(1 / faster.max(), abs=0.06)
    assert float(last) == pytest.approx(1 / faster.min(), abs=0.06)


AXES = {"sweep": "axes", "model": "mini", "world_size": 2, "device": "cpu", "batch": 2,
        "context_length": 64, "point": "p"}  # fmt: skip


def test_an_axis_whose_peak_is_unknown_is_timed_all_the_same():
    """ "Not measured: sharded" stood beside its measured time, 1.085."""
    rows = timed("axis", {"data parallel": 1.0, "sharded": 1.085}, **AXES)
    refusal = {"axis": "sharded", "status": "refused", "reason": "freed by other threads"}
    rows += [AXES | refusal | {"rank": 1}, AXES | {"axis": "data parallel", "peak_bytes": 2**20}]
    assert ask("model_parallel", "axis", rows).notes == ()
    (note,) = ask("model_parallel", "axis_memory", rows).notes
    assert note.reason == refusal["reason"]


def test_gathering_keys_and_values_needs_what_the_notebook_says():
    """ "More than one rank with the whole sequence": the table beside it said 0.93 to 1.00."""
    table = load_lab("context_parallel").answers(recorded("context_parallel").results())["memory"]
    table = table.table[table.table["way"] == "gathered, zigzag"]
    assert set(table["world_size"]) == {2}
    assert table["ratio"].between(0.9, 1.05).all()  # "about as much"


STEP = {"model": "mini", "world_size": 2, "batch": 2, "context_length": 64, "point": "p"}


def test_six_noisy_rounds_of_the_tuned_step_advise_neither_to_change_nor_to_keep():
    """0.874 [0.776, 0.983] of six rounds made the index begin with "Train with the defaults"."""
    pair = {"default": 1.0, "joined": 0.95}
    answer = ask("tuned_step", "gain", timed("implementation", pair, noise=0.15, rounds=6, **STEP))
    assert answer.table["high"].item() > 1 > 0.9 > answer.table["low"].item()
    assert answer.verdict == "undecided"
    assert answer.advice is None
    assert answer.seconds_more > 0


def test_nothing_is_kept_while_an_alternative_may_gain():
    """ "Keep default buckets" with an interval down to 0.80; "Shard only to save memory" beside
    ZeRO-2's 0.884."""
    buckets = {"sweep": "buckets", "phase": "backward", "workload": "mini", "world_size": 2,
               "backend": "gloo", "device": "cpu", "batch": 2, "context_length": 32,
               "implementation": "torch"}  # fmt: skip
    stages = {"kind": "time", "size": "mini", "optimizer": "AdamW", "transport": "shared",
              "world_size": 2, "device": "cpu", "part": "forward"}  # fmt: skip
    asked = (
        ("data_parallel", "bucket_size", "bucket", {"default": 1.0, "1.0": 0.97}, buckets),
        ("sharding", "time", "implementation", {"ddp": 1.0, "zero2": 0.93, "zero3": 1.2}, stages),
    )
    for lab, question, column, ratios, about in asked:
        kept = load_lab(lab).question(question).keep
        noisy = ask(lab, question, timed(column, ratios, noise=0.3, **about))
        assert noisy.verdict in ("no", "undecided")
        assert noisy.advice is None
        quiet = dict.fromkeys(ratios, 1.0)
        assert ask(lab, question, timed(column, quiet, **about)).advice == kept
        busy = ask(lab, question, timed(column, quiet, **about), is_busy=True)
        assert busy.advice is None


WRAPPERS = {"sweep": "wrappers", "workload": "mini", "world_size": 2, "backend": "gloo",
            "device": "cpu", "batch": 2, "context_length": 32}  # fmt: skip


def steps(**backward):
    """Rows of wrappers whose steps differ by their backward pass."""
    rows = []
    for seed, (phase, seconds) in enumerate({"forward": 1.0, "optimizer": 1.0}.items()):
        same = dict.fromkeys(backward, seconds)
        rows += timed("implementation", same, seed=seed, phase=phase, **WRAPPERS)
    rows += timed("implementation", backward, seed=2, phase="backward", **WRAPPERS)
    waiting = {name: 0.1 for name in backward if name != "local"}
    return rows + timed("implementation", waiting, seed=3, phase="waiting", **WRAPPERS)


def test_a_wrapper_saves_what_a_step_saves():
    """ "15 to 24% less" was the backward pass alone; a step takes 10 to 18% less."""
    answer = ask("data_parallel", "fastest", steps(local=0.5, torch=1.0, bucketed=0.8))
    assert answer.effect == pytest.approx(2.8 / 3, abs=0.01)


def test_the_cost_of_averaging_names_its_wrapper():
    """ "37.3% longer, hides 0%" was one unnamed wrapper of seven."""
    answer = ask("data_parallel", "communication", steps(local=0.5, torch=1.0, bucketed=0.8))
    assert answer.values["implementation"] == "BucketedDDP"
    assert answer.values["longer_percent"] == pytest.approx(100 * 0.3 / 2.5, abs=2)
    assert {"implementation", "workload"} <= fields_of(answer.says)


def fields_of(template):
    return {part.partition("}")[0] for part in template.split("{")[1:]}


def test_a_model_that_fits_stands_beside_what_fits_unsharded():
    """ "FSDP fits large on 4 ranks", at batch 1 and 32 tokens, where DDP fits it, too."""
    row = {"kind": "memory", "world_size": 4, "host_ranks": 4, "device": "cpu", "batch": 1,
           "context_length": 32}  # fmt: skip
    for machine_bytes, is_same in ((24 * 2**30, False), (2**50, True)):
        answer = ask("sharding", "largest_model", [row], machine_bytes=machine_bytes)
        assert (answer.values["with_ddp"] == answer.values["model"]) == is_same
        assert {"with_ddp", "batch", "context_length"} <= fields_of(answer.says)


def test_a_lower_loss_is_no_reason_to_synchronize_batch_norm_and_its_price_is_an_answer():
    """ "Synchronize batch norm, 5% lower loss": accuracy showed none, epochs took longer."""
    rows = []
    rng = np.random.default_rng(0)
    for batch_norm, loss, epoch_s in (("BatchNorm", 1.0, 1.0), ("SyncBatchNorm", 0.95, 1.12)):
        for seed in range(6):
            wobble = np.exp(rng.normal(0, 0.005))
            about = {"dataset": "digits", "world_size": 2, "batch": 8, "epochs": 3, "rank": 0}
            rows += [
                about
                | {"wrapper": "own", "batch_norm": batch_norm, "seed": seed, "phase": "epoch"}
                | {"implementation": f"own + {batch_norm}", "status": "ok", "warm_up": epoch == 0}
                | {"epoch": epoch, "epoch_s": epoch_s * wobble, "validation_loss": loss * wobble}
                | {"train_loss": loss, "accuracy_percent": 90.0}
                for epoch in range(3)
            ]
    loss = ask("cifar100", "sync_batchnorm", rows)
    price = ask("cifar100", "sync_batchnorm_time", rows)
    assert (loss.direction, loss.advice) == ("better", None)
    assert (price.direction, price.effect) == ("worse", pytest.approx(1.12, abs=0.01))


def test_the_implementation_that_is_faster_in_bfloat16_is_named_there():
    """ "Use SDPA", where tiled is 3.9 to 9.5 times faster than naive, and SDPA 2.0 to 2.6."""
    rows = []
    for seed, (dtype, sequence, sdpa, tiled) in enumerate([
        *(("float32", 256 << number, 3.0, 1.2) for number in range(5)),
        *(("bfloat16", 256 << number, 2.3, 3.9 + number) for number in range(5)),
    ]):  # fmt: skip
        ratios = {"explicit": 1.0, "sdpa": 1 / sdpa, "tiled": 1 / tiled}
        about = {"device": "cpu", "dtype": dtype, "batch": 1, "head_dim": 64, "sequence": sequence}
        rows += timed("implementation", ratios, seed=seed, phase=attention.BOTH, **about)
    answer = ask("attention", "fastest", rows)
    faster = answer.table[answer.table["dtype"] == "bfloat16"].groupby("implementation")["ratio"]
    assert faster.max()["tiled"] < faster.min()["sdpa"]
    named = {answer.subject, *(name for name, _ in answer.overtaken)}
    assert "tiled attention" in named
    assert "tiled attention" in advice(answer)
    regions = [region for name, region in answer.overtaken if name == "tiled attention"]
    assert answer.subject == "tiled attention" or regions[0].values == ("bfloat16",)


def tensor(torch, shared, seed=0, **about):
    ratios = {"one rank, all cores": 1.0, "torch": torch, "shared": shared}
    at = {"sweep": "tensor", "world_size": 2, "device": "cpu"} | about
    return timed("way", ratios, seed=seed, **at)


def test_tensor_parallelism_names_no_transport_that_the_next_answer_calls_slower():
    """It named torch's collectives (.748), and the next answer called shared memory faster."""
    same = tensor(0.748, 0.752, width=256)
    answer = ask("model_parallel", "width", same)
    assert {answer.subject, *answer.ties} >= {
        "tensor parallelism with torch's collectives",
        "tensor parallelism through shared memory",
    }
    assert ask("model_parallel", "transport", same).verdict == "no clear difference"
    differs = [
        row
        for seed, (width, torch, shared) in enumerate([(128, 0.9, 0.7), (256, 0.748, 0.752)])
        for row in tensor(torch, shared, seed, width=width)
    ]
    assert ask("model_parallel", "width", differs).subject == (
        "tensor parallelism through shared memory"
    )


def test_a_share_outside_of_its_bound_is_not_rounded_into_it():
    """A pipeline's "worst 0.9" was .858, and .9 would pass."""
    row = {"sweep": "pipeline", "world_size": 2, "device": "cpu", "width": 128, "layers": 4,
           "schedule": "gpipe", "micro_batches": 8, "held": 8, "formula_held": 8, "calls": 0,
           "sent_bytes": 0, "formula_busy": 0.9, "seconds": 1.0, "repeat": 0}  # fmt: skip
    rows = [row | {"rank": 0, "idle_s": 0.1}, row | {"rank": 1, "idle_s": 1 - 0.858 * 0.9}]
    answer = ask("model_parallel", "busy", rows)
    assert answer.worst == pytest.approx(0.858)
    (worst,) = [float(word) for word in headline(answer).split() if word.startswith("0.")]
    assert 1 / worst > answer.within
