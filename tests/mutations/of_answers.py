"""Mistakes in what a run says: a lost case, the wrong side, a table of other rows."""

from tests.mutations.mistake import mistakes

COMPARING = ("tests/lab/test_comparing.py",)
FINDINGS = "tests/studies/test_{}_findings.py"

MISTAKES = [
    *mistakes(
        "machine/description.py",
        ("tests/lab/test_measure.py", "tests/lab/test_index.py", "tests/studies/test_this_machine.py"),
        another_cpu_of_that_name_is_this_machine=(
            "[self.host, self.label, self.instructions]",
            "[self.host, self.label]",
        ),
    ),
    *mistakes(
        "studies/shared/attention_passes.py",
        ("tests/studies/test_attention_worker.py",),
        what_is_wrong_and_slow_is_right=('if gate == "ok" and point.rounds_s', "if point.rounds_s"),
        what_takes_longer_than_all_rounds_is_timed=(
            "if (pass_s := min(pass_s, again_s)) > point.rounds_s",
            "if (pass_s := min(pass_s, again_s)) > 6 * point.rounds_s",
        ),
        a_stall_is_slowness=("min(pass_s, again_s)", "max(pass_s, again_s)"),
    ),
    *mistakes(
        "lab/comparing.py",
        COMPARING,
        advice_of_some_settings_is_told_of_all=("if better.empty or len(better) == len(table):", "if True:"),
    ),
    *mistakes(
        "lab/sentences.py",
        COMPARING,
        of_uneven_ratios_the_largest_is_quoted=(
            "(sizes[is_even] - sizes.median()).abs().idxmin()",
            "sizes.idxmax()",
        ),
    ),
    *mistakes(
        "lab/rows.py",
        COMPARING,
        a_median_of_two_turns_is_as_sure_as_of_one=("samples[TURN].nunique() > 1 and", "False and"),
    ),
    *mistakes(
        "lab/pages/importance.py",
        ("tests/lab/test_effects.py",),
        a_page_begins_with_its_smallest_difference=('-answer["size"]', 'answer["size"]'),
        what_is_uneven_is_told_by_its_furthest=(
            'effect["high"] if is_less else effect["low"]',
            'effect["low"] if is_less else effect["high"]',
        ),
    ),
    *mistakes(
        "lab/as_predicted.py",
        COMPARING,
        a_prediction_is_judged_by_its_best_case=("off.index[-1]", "off.index[0]"),
        what_is_too_low_is_told_as_too_high=(
            "the worst is {_times(ratios[worst])}",
            "the worst is {_times(off[worst])}",
        ),
        what_is_too_short_is_not_off=("off = np.maximum(ratios, 1 / ratios)", "off = ratios"),
    ),
    *mistakes(
        "studies/memory/findings.py",
        (FINDINGS.format("memory"),),
        checkpointing_costs_nothing=(
            "at_the_cost_of(with_model(gain, peaks), with_model(cost, times))",
            "with_model(gain, peaks)",
        ),
    ),
    *mistakes(
        "studies/cifar100/samples.py",
        (FINDINGS.format("cifar100"),),
        what_diverged_counts=('[~table["diverged"].astype(bool)].drop', ".drop"),
        one_good_loss_makes_a_training_good=(".astype(float)).all(axis=1)", ".astype(float)).any(axis=1)"),
    ),
    *mistakes(
        "studies/gradient_buckets/findings.py",
        (FINDINGS.format("gradient_buckets"),),
        who_waits_less_waits_longer=(
            "(row.bucket_mb, row.smaller_mb) if row.ratio > 1 else (row.smaller_mb, row.bucket_mb)",
            "(row.smaller_mb, row.bucket_mb) if row.ratio > 1 else (row.bucket_mb, row.smaller_mb)",
        ),
    ),
    *mistakes(
        "lab/rows.py",
        (FINDINGS.format("attention"), FINDINGS.format("flash_attention")),
        both_passes_take_as_long_as_the_slower=(
            '.agg(["sum", "count"]).rename(columns={"sum": "seconds"})',
            '.agg(["max", "count"]).rename(columns={"max": "seconds"})',
        ),
    ),
    *mistakes(
        "studies/sync_batchnorm/findings.py",
        (FINDINGS.format("sync_batchnorm"),),
        the_price_is_that_of_torchs=(
            "tables.ratios(frame, OWN, LOCAL, phase=BOTH),\n        LABKITS",
            "tables.ratios(frame, LOCAL, OWN, phase=BOTH),\n        LABKITS",
        ),
    ),
    *mistakes(
        "studies/all_reduce/findings.py",
        (FINDINGS.format("all_reduce"),),
        the_floor_is_of_every_length=('floor[floor["n_bytes"] == floor["n_bytes"].max()]', "floor"),
    ),
    *mistakes(
        "studies/all_reduce/tables.py",
        (FINDINGS.format("all_reduce"),),
        every_crossover_holds=('return "holds" if until <= predicted <= start else "does not hold"', 'return "holds"'),
    ),
]
