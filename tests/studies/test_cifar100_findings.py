"""Findings of the CIFAR-100 lab on made-up frames: as published, contrary, noisy, and with rows missing."""

from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.nn.datasets import CIFAR100_MD5
from labkit.studies.cifar100 import samples, tables
from labkit.studies.cifar100.study import STUDY
from labkit.studies.cifar100.training import IMPLEMENTATIONS, OWN_LOCAL, OWN_SYNC, TORCH_LOCAL, TORCH_SYNC
from labkit.studies.cifar100.worker import EPOCH, MEMORY
from tests.calibrated import ALPHA_S, made_up
from tests.studies.answering import answers_of

_findings = partial(answers_of, STUDY)

MIB = 2**20
ON_CPU = (OWN_SYNC, OWN_LOCAL, TORCH_LOCAL)
ALIKE = dict.fromkeys(IMPLEMENTATIONS, 0.0)
SECONDS = {OWN_SYNC: 1.85, OWN_LOCAL: 1.65, TORCH_SYNC: 1.83, TORCH_LOCAL: 1.63}
SETTING = {
    "world_size": 2,
    "backend": "nccl",
    "device": "cuda",
    "dataset": "cifar100",
    "source": "CIFAR-100, the official archive",
    "md5": CIFAR100_MD5,
    "epochs": 16,
    "batch": 64,
    "accumulation": 4,
    "learning_rate": 0.01,
    "momentum": 0.5,
    "check": "ok",
}
DIGITS = {"device": "cpu", "backend": "gloo", "dataset": "digits", "source": "digits", "md5": None}


def _frame(
    gains=ALIKE, *, names=IMPLEMENTATIONS, seconds=SECONDS, seeds=8, scatter=0.05, noise=0.005, epochs=16, **setting
):
    """Rows as a run has them: `gains` are points of accuracy over the seed's own, `scatter` their spread."""
    generator = np.random.default_rng(0)
    rows = []
    for seed in range(seeds):
        here = SETTING | setting | {"seed": seed, "repeat": 0}
        of_seed = generator.normal(0, 1)  # seeds differ by far more than implementations of one
        for name in names:
            peak = (162 if name.startswith("own") else 166) * MIB
            rows += [
                here | {"phase": MEMORY, "implementation": name, "rank": rank, "peak_bytes": peak} for rank in (0, 1)
            ]
        for epoch in range(1, epochs + 1):
            for name in names:
                gain = gains[name] + generator.normal(0, scatter)
                row = here | {"phase": EPOCH, "implementation": name, "epoch": epoch, "error": 1e-14}
                slowest = seconds[name] * np.exp(generator.normal(0, noise))
                rows.append(row | {"rank": 1, "epoch_s": 0.9 * slowest})
                told = {"accuracy": (epoch * 1.5 + of_seed + gain) / 100, "train_loss": 3.3 - gain / 50}
                told |= {"validation_loss": 3.2 - gain / 50, "classes": 100, "trained": 49_920, "validated": 10_000}
                rows.append(row | told | {"rank": 0, "epoch_s": slowest, "micro_batches": 390})
    return pd.DataFrame(rows)


def test_every_question_is_answered_from_a_full_frame():
    assert all(finding.verdict != "not measured" for finding in _findings(_frame()).values())


def _claims(findings):
    return {claim.text: claim.outcome for claim in findings["published_trends"].claims}


def test_trainings_that_agree_are_shown_to_be_the_same():
    findings = _findings(_frame())
    assert findings["same_training"].verdict == findings["published_trends"].verdict == "yes"
    assert set(findings["same_training"].table["verdict"]) == {"the same"}
    assert findings["published_trends"].why.startswith("With SyncBatchNorm, as published, accuracy here is ")


def test_an_own_wrapper_that_trains_worse_is_said_to():
    findings = _findings(_frame(ALIKE | {OWN_SYNC: -4.0}))
    assert findings["same_training"].verdict == "no"
    assert "own + SyncBatchNorm ends with a lower accuracy than torch" in findings["same_training"].headline
    assert _claims(findings)["Both train equally well"] == "is contradicted in some settings"


def test_noise_shows_neither_sameness_nor_a_difference():
    findings = _findings(_frame(scatter=4.0))
    assert findings["same_training"].verdict == findings["sync_batchnorm"].verdict == "undecided"
    assert findings["sync_batchnorm"].advice.startswith("Keep local batch norm with 64 images per rank")


def _marks(finding, quantity):
    return {effect.verdict for effect in finding.effects if effect.quantity == quantity}


def test_a_difference_within_a_seed_is_seen_although_seeds_differ_more():
    findings = _findings(_frame(ALIKE | {OWN_SYNC: 1.5, TORCH_SYNC: 1.5}))
    sync = findings["sync_batchnorm"]
    assert (sync.verdict, sync.significant) == ("yes", True)
    assert sync.advice == "Synchronize batch norm with 64 images per rank (cifar100)."
    assert sync.also.startswith("An epoch with batch norm over all ranks takes 12 % longer")
    assert (_marks(sync, "validation error"), _marks(sync, "time")) == ({"faster"}, {"slower"})
    assert findings["same_training"].verdict == "yes"


def test_synchronizing_that_harms_is_a_no():
    found = _findings(_frame(ALIKE | {OWN_SYNC: -8.0, TORCH_SYNC: -8.0}))["sync_batchnorm"]
    told = "the accuracy is lower and validation loss is higher"
    assert found.headline == f"No: with batch norm over all ranks, {told}."
    assert found.advice.startswith("Keep local batch norm")
    assert _marks(found, "validation error") == _marks(found, "validation loss") == {"slower"}


@pytest.mark.parametrize(("points", "is_better"), [(2.0, True), (-2.0, False)])
def test_an_effect_is_below_one_where_less_of_its_quantity_is_better(points, is_better):
    """A ratio of accuracies would be read the wrong way round: left of 1 is less."""
    found = _findings(_frame(ALIKE | {OWN_SYNC: points, TORCH_SYNC: points}, scatter=0.0))["sync_batchnorm"]
    accuracy = tables.outcome(_frame(scatter=0.0)).set_index("implementation").loc[OWN_LOCAL, "accuracy_percent"]
    errors = [effect for effect in found.effects if effect.quantity == "validation error"]
    assert [effect.ratio for effect in errors] == pytest.approx([1 - points / (100 - accuracy)] * 2, rel=1e-3)
    assert all(effect.low <= effect.ratio <= effect.high for effect in errors)
    assert {effect.ratio < 1 for effect in found.effects if effect.quantity.startswith("validation")} == {is_better}
    assert {effect.quantity for effect in found.effects} == {"validation error", "validation loss", "time"}
    assert found.lead.quantity.startswith("validation")
    assert (found.lead.ratio < 1) == is_better


def test_a_loss_that_is_lower_alone_is_told_with_what_accuracy_shows():
    frame = _frame(scatter=0.0)
    is_sync = frame["implementation"].isin([OWN_SYNC, TORCH_SYNC])
    frame.loc[is_sync, "validation_loss"] *= 0.95
    found = _findings(frame)["sync_batchnorm"]
    told = "the validation loss is up to 5.0 % lower; accuracy shows no clear difference"
    assert found.headline == f"Yes: with batch norm over all ranks, {told}."
    assert (found.lead.quantity, found.lead.ratio) == ("validation loss", pytest.approx(0.95))


def test_without_an_error_to_lower_no_ratio_of_errors_is_told():
    frame = _frame(scatter=0.0)
    frame.loc[frame["accuracy"].notna(), "accuracy"] = 1.0
    assert _marks(_findings(frame)["sync_batchnorm"], "validation error") == set()


def test_what_is_significant_but_within_the_margin_counts_as_the_same():
    found = _findings(_frame(ALIKE | {OWN_SYNC: 0.6, TORCH_SYNC: 0.6}))["sync_batchnorm"]
    assert found.verdict == "no"
    assert set(found.table["verdict"]) == {"the same"}
    assert found.advice.startswith("Keep local batch norm")


def test_one_wrapper_alone_does_not_show_what_synchronizing_does():
    found = _findings(_frame(ALIKE | {OWN_SYNC: 2.0}))["sync_batchnorm"]
    assert (found.verdict, found.advice) == ("it depends", None)
    assert "with one wrapper only" in found.headline


def test_on_a_cpu_wrappers_are_compared_with_local_batch_norm_and_the_page_says_so():
    findings = _findings(_frame(names=ON_CPU, **DIGITS))
    assert set(findings["same_training"].table["implementation"]) == {OWN_LOCAL}
    assert "with labkit's wrapper, accuracy" in findings["same_training"].headline, "not its SyncBatchNorm"
    assert "torch's SyncBatchNorm refuses CPU tensors" in findings["same_training"].caveat
    assert "cannot be compared: images or recipe are others" in findings["published_trends"].why
    assert findings["sync_batchnorm"].verdict == "no"
    assert "of digits (not CIFAR-100)" in findings["learned"].headline


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0, "no clear difference"), (1.2, "no"), (0.8, "yes")], ids=["alike", "slower", "faster"]
)
def test_time_is_judged_by_the_ratio_within_a_seed_and_epoch(factor, verdict):
    seconds = dict.fromkeys(IMPLEMENTATIONS, 1.0) | {OWN_SYNC: factor, OWN_LOCAL: factor}
    assert _findings(_frame(seconds=seconds))["time"].verdict == verdict


def test_the_slowest_rank_counts_and_the_first_epoch_does_not():
    table = samples.times(_frame(noise=0.0))
    assert sorted(set(table["epoch"])) == list(range(2, 17))
    assert table.loc[table["implementation"] == OWN_LOCAL, "epoch_s"].tolist() == pytest.approx([1.65] * 8 * 15)


@pytest.mark.parametrize("told_since", [1, 9], ids=["told", "told since it goes on"])
def test_the_first_epoch_after_a_resume_does_not_count_as_a_time(told_since):
    frame = _frame(noise=0.0)
    resumed = (frame["epoch"] == 9) & (frame["seed"] == 3)
    first = (frame["epoch"] == 1) | resumed
    frame.loc[first & (frame["implementation"] == OWN_LOCAL), "epoch_s"] *= 3
    frame["warm_up"] = first.astype(object).where(frame["epoch"] >= told_since)
    table = samples.times(frame)
    assert table.loc[table["implementation"] == OWN_LOCAL, "epoch_s"].tolist() == pytest.approx([1.65] * (8 * 15 - 1))
    assert (3, 9) not in set(zip(table["seed"], table["epoch"], strict=True))
    assert samples.times(_frame(noise=0.0)[lambda rows: ~resumed]).equals(table)


def test_a_training_of_nothing_but_first_epochs_has_their_times():
    frame = _frame(epochs=2, noise=0.0).assign(warm_up=True)
    assert sorted(set(samples.times(frame)["epoch"])) == [1, 2]


def test_a_training_resumed_after_the_first_of_two_epochs_has_a_time_beside_others_that_were_not():
    frame = _frame(epochs=2, noise=0.0)
    resumed = frame["seed"] == 3
    table = samples.times(frame.assign(warm_up=(frame["epoch"] == 1) | resumed))
    assert {seed: sorted(set(rows["epoch"])) for seed, rows in table.groupby("seed")} == {
        seed: [1, 2] if seed == 3 else [2] for seed in range(8)
    }


def test_what_synchronizing_costs_is_beside_what_its_collectives_should_cost():
    frame = _frame(noise=0.0).assign(backend="gloo", device="cpu")
    table = tables.synchronizing(frame, made_up()).set_index("implementation")
    assert table["predicted_s"].tolist() == pytest.approx([390 * 2 * ALPHA_S] * 2, rel=0.05)
    told = answers_of(STUDY, frame, calibration=made_up())["sync_batchnorm"].why
    assert "its collectives should take" in told
    assert "should take" not in _findings(frame)["sync_batchnorm"].why
    noisy = _frame(noise=1.0).assign(backend="gloo", device="cpu")
    found = answers_of(STUDY, noisy, calibration=made_up())["sync_batchnorm"]
    assert found.also.startswith("No clear difference")
    assert found.why is None
    assert table.loc[OWN_SYNC, "extra_s"] == pytest.approx(0.2)


def test_numbers_come_from_the_frame():
    findings = _findings(_frame(scatter=0.0, noise=0.0, seeds=7))
    accuracies = findings["learned"].table["accuracy_percent"]
    assert findings["learned"].headline.startswith(f"At the end, {accuracies[0]:.0f} % of the validation images")
    assert "a guess is right in 1 %" in findings["learned"].why
    assert set(findings["learned"].table["seeds"]) == {7}
    assert findings["time"].why == "Epochs take 1.63 s to 1.85 s, by implementation."
    assert findings["memory"].table["ratio"].tolist() == pytest.approx([162 / 166] * 2)


def test_few_seeds_give_no_verdict_and_no_advice():
    findings = _findings(_frame(ALIKE | {OWN_SYNC: 5.0, TORCH_SYNC: 5.0}, seeds=3, epochs=2))
    assert findings["same_training"].verdict == findings["sync_batchnorm"].verdict == "undecided"
    assert findings["same_training"].headline.startswith("Too few seeds to tell")
    assert findings["sync_batchnorm"].advice is None


def test_seeds_that_lack_an_implementation_are_left_out_of_its_comparison():
    frame = _frame()
    frame = frame[~((frame["seed"] == 0) & (frame["implementation"] == TORCH_SYNC))]
    seeds = tables.differences(frame, tables.SAME).set_index(["implementation", "metric"])["seeds"]
    assert seeds[OWN_SYNC, "accuracy"] == 7
    assert seeds[OWN_LOCAL, "accuracy"] == 8


def test_one_implementation_alone_has_numbers_and_no_comparison():
    findings = _findings(_frame(names=(OWN_SYNC,)))
    assert findings["time"].verdict == findings["memory"].verdict == "measured"
    assert findings["same_training"].verdict == findings["sync_batchnorm"].verdict == "not measured"


def test_a_wrong_implementation_is_shouted():
    wrong = SETTING | {"phase": EPOCH, "implementation": OWN_SYNC, "check": "wrong: error 1", "seed": 0, "rank": 0}
    frame = pd.concat([_frame(names=(OWN_LOCAL, TORCH_LOCAL)), pd.DataFrame([wrong])], ignore_index=True)
    shouted = f"WRONG RESULTS, and so no times, from {OWN_SYNC}"
    assert shouted in _findings(frame)["learned"].caveat
    alone = _findings(pd.DataFrame([wrong]))["learned"]
    assert alone.verdict == "not measured"
    assert shouted in alone.caveat


def test_published_values_are_read_from_the_table():
    table = tables.published()
    assert table.loc[OWN_SYNC, "training_s"] == 29.632  # of the slower rank
    assert table.loc[TORCH_SYNC, "peak_bytes"] == 174062592
    assert tables.published_ratio("training_s") == pytest.approx(29.632 / 29.279)


def _diverging(frame, name, seeds, value=np.nan):
    """From the third epoch on; accuracy stays a number, as it does: an image still counts as right or not."""
    lost = (frame["implementation"] == name) & frame["seed"].isin(seeds) & (frame["epoch"] >= 3)
    frame.loc[lost & frame["accuracy"].notna(), ["train_loss", "validation_loss"]] = value
    return frame


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_training_that_diverges_is_counted_and_shows_nothing_to_be_the_same(value):
    frame = _diverging(_frame(), OWN_SYNC, [0], value)
    findings = _findings(frame)
    assert (
        "DIVERGED, with a loss that is not finite: 1 of 8 seeds with own + SyncBatchNorm." in findings["learned"].caveat
    )
    assert findings["same_training"].verdict == findings["sync_batchnorm"].verdict == "undecided"
    assert "of 8 seeds 1 with own + SyncBatchNorm and 0 with torch" in findings["same_training"].caveat
    assert "1 with own + SyncBatchNorm and 0 with own + BatchNorm" in findings["sync_batchnorm"].caveat
    assert findings["sync_batchnorm"].advice is None
    assert _claims(findings)["Both train equally well"] == "is not shown here"
    for table in (tables.by_epoch(frame, "accuracy"), tables.losses_by_epoch(frame)):
        assert set(table["n"]) == {7, 8}
    assert np.isfinite(tables.losses_by_epoch(frame)["loss"]).all()


def test_where_every_seed_diverges_with_one_implementation_it_does_not_train_as_well():
    findings = _findings(_diverging(_frame(), OWN_SYNC, range(8)))
    assert findings["same_training"].verdict == "no"
    assert "a higher number of diverged trainings" in findings["same_training"].headline
    assert findings["sync_batchnorm"].verdict == "undecided"  # the other wrapper is alike
    assert findings["learned"].verdict == "measured"


def test_where_everything_diverges_nothing_is_claimed():
    frame = _frame()
    for name in IMPLEMENTATIONS:
        frame = _diverging(frame, name, range(8))
    findings = _findings(frame)
    assert findings["same_training"].verdict == findings["sync_batchnorm"].verdict == "undecided"
    assert findings["sync_batchnorm"].advice is None
    assert "no training with SyncBatchNorm, as published, came to its end" in findings["published_trends"].why
    assert tables.differences(frame, tables.SYNC).empty


def test_synchronizing_that_keeps_trainings_from_diverging_is_advised():
    frame = _frame()
    for name in (OWN_LOCAL, TORCH_LOCAL):
        frame = _diverging(frame, name, range(6))
    found = _findings(frame)["sync_batchnorm"]
    assert (found.verdict, found.headline) == (
        "yes",
        "Yes: with batch norm over all ranks, the number of diverged trainings is lower.",
    )


def test_the_last_epoch_is_one_that_all_seeds_have():
    frame = _frame()
    frame = frame[(frame["seed"] > 0) | ~(frame["epoch"] > 10)]
    assert set(samples.last_epoch(frame)["epoch"]) == {10}
    assert set(samples.last_epoch(frame)["seed"]) == set(range(8))
    findings = _findings(frame)
    assert set(findings["learned"].table["epoch"]) == {10}
    assert "cannot be compared" in findings["published_trends"].why


@pytest.mark.parametrize(
    "changes", [{"train_images": 640}, {"names": (OWN_LOCAL, TORCH_LOCAL)}, {"epochs": 15}, {"batch": 32}], ids=str
)
def test_accuracies_are_beside_the_published_ones_only_for_the_same_training(changes):
    assert "cannot be compared" in _findings(_frame(**changes))["published_trends"].why


def test_only_synchronized_trainings_are_beside_the_published_accuracy():
    why = _findings(_frame(ALIKE | {OWN_LOCAL: 9.0, TORCH_LOCAL: 9.0}, scatter=0.0))["published_trends"].why
    accuracy = tables.outcome(_frame(scatter=0.0)).set_index("implementation").loc[OWN_SYNC, "accuracy_percent"]
    assert why == f"With SyncBatchNorm, as published, accuracy here is {accuracy:.1f} %."


def test_epochs_of_one_training_are_no_samples_of_their_own():
    seconds = dict.fromkeys(IMPLEMENTATIONS, 1.0) | {OWN_SYNC: 1.5, OWN_LOCAL: 1.5}
    few, enough = (_frame(seconds=seconds, seeds=seeds) for seeds in (5, 6))
    assert _findings(few)["time"].verdict == "undecided"
    assert tables.synchronizing(few, None)["low"].isna().all()
    assert _findings(enough)["time"].verdict == "no"
    assert set(tables.time_summary(enough)["n"]) == {6}
