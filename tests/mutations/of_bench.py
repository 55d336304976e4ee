"""Mistakes in the instruments: intervals, verdicts, exact sums, gates."""

from tests.mutations.mistake import mistakes

INTERVALS = ("tests/bench/test_intervals.py", "tests/bench/test_statistics.py")
GATE = ("tests/bench/test_gate.py",)
GRADIENTS = ("tests/studies/test_gradient_gate.py",)
ROUNDS = ("tests/bench/test_stopping.py",)
SUMS = ("tests/bench/test_exact_sums.py",)

MISTAKES = [
    *mistakes(
        "bench/intervals.py",
        INTERVALS,
        the_upper_bound_is_one_too_low=(
            "(1 - weight) * ordered[n - depth] + weight * ordered[n - depth - 1]",
            "(1 - weight) * ordered[n - depth - 1] + weight * ordered[n - depth - 2]",
        ),
        one_sided_p=("min(1.0, 2 * float(at_most[int(fewer)]))", "min(1.0, float(at_most[int(fewer)]))"),
        rounds_that_resemble_one_another_count_fully=(
            "float(np.sqrt((1 + correlation) / (1 - correlation)))",
            "float(np.sqrt((1 - correlation) / (1 - correlation)))",
        ),
        comparisons_are_corrected_by_their_number_alone=("/ np.arange(1, len(order) + 1)", "/ 1"),
    ),
    *mistakes(
        "bench/statistics.py",
        INTERVALS,
        small_differences_are_claimed=("ratio >= 1 + LEAST_RELEVANT_DIFFERENCE", "ratio >= 1"),
        the_fastest_rank_counts=("[value].max().reset_index()", "[value].min().reset_index()"),
        many_comparisons_are_judged_one_by_one=(
            'adjusted_p = adjusted(ratios["p"].to_numpy(dtype=float))',
            'adjusted_p = ratios["p"].to_numpy(dtype=float)',
        ),
    ),
    *mistakes(
        "bench/turns.py",
        ("tests/bench/test_turns.py",),
        only_rounds_count=(
            'np.fmax(np.fmax(here, found["between"].mean()), found["within"])',
            'found["rounds"]',
        ),
        settings_that_agree_by_chance_are_sure=('np.fmax(here, found["between"].mean())', "here"),
        two_turns_are_no_better_than_one=('variance / found["turns"]', "variance"),
        few_settings_tell_as_well_as_many=("freedom = max(1, len(", "freedom = max(99, len("),
    ),
    *mistakes(
        "lab/rows.py",
        ("tests/studies/test_all_reduce_findings.py",),
        turns_are_rounds_of_one=(
            "        return slowest_rank(rows, self.value, self._keys)",
            "        return slowest_rank(rows, self.value, self.columns)",
        ),
    ),
    *mistakes(
        "bench/stopping.py",
        ROUNDS,
        the_steadiest_pair_decides=(
            "return max((found.high - found.low) / 2",
            "return min((found.high - found.low) / 2",
        ),
        one_part_is_enough=("return all(widest_ratio(", "return any(widest_ratio("),
        ranks_look_at_the_fastest=("op=dist.ReduceOp.MAX", "op=dist.ReduceOp.MIN"),
        the_verdict_decides=(
            "found.high - found.low) / 2 for found",
            "min(abs(found.low), abs(found.high))) for found",
        ),
        time_ends_rounds_before_there_is_an_interval=("self._next_look = FEWEST_SAMPLES if", "self._next_look = 1 if"),
    ),
    *mistakes(
        "bench/gate.py",
        GATE,
        no_number_is_within_the_limit=("if error <= limit else", "if not error > limit else"),
        no_number_is_passed_over=("math.inf if any(map(math.isnan, errors)) else max(", "max("),
        no_number_of_a_rank_is_passed_over=("math.inf if math.isnan(error) else error  #", "error  #"),
        the_first_element_goes_unnoticed=("if of_rank[0] >= 0)", "if of_rank[0] > 0)"),
        the_best_rank_counts=("op=dist.ReduceOp.MAX", "op=dist.ReduceOp.MIN"),
    ),
    *mistakes(
        "studies/shared/gradient_gate.py",
        GRADIENTS,
        a_part_of_a_mean_may_be_missing=("within=HALF)", "within=40 * HALF)"),
        a_gradient_may_be_missing=("return _LOST if gradient is not None or of_passes else (", "return ("),
        micro_batches_are_alike=("begins[index] + 7 * len(starts[index])", "begins[index]"),
    ),
    *mistakes(
        "bench/exact_sums.py",
        SUMS,
        the_last_rank_adds_nothing=("min(first + at_once, ranks))", "min(first + at_once, ranks - 1))"),
        a_part_may_be_zero=("% modulus + 1).double()", "% modulus).double()"),
        no_number_is_no_deviation=(
            "is_right = (got.double() - exact[: len(got)]).abs() <= within",
            "is_right = ~((got.double() - exact[: len(got)]).abs() > within)",
        ),
        the_rest_of_a_tensor_is_not_compared=(
            "tensor.view(-1).split(at_once), strict=True",
            "tensor.view(-1)[:-1].split(at_once), strict=False",
        ),
    ),
    *mistakes(
        "bench/intervals.py",
        INTERVALS,
        the_interval_is_one_rank_too_narrow=("[-1]) + 1", "[-1]) + 2"),
        ties_count_as_smaller=("(averages > 0).sum() + (averages == 0).sum() / 2", "(averages > 0).sum()"),
        student_reaches_to_the_wrong_quantile=("stdtrit(freedom, 1 - TAIL)", "stdtrit(freedom, 1 - 2 * TAIL)"),
        shifts_deviate_too_much=("(len(a) + len(b) + 1) / 12)", "(len(a) + len(b) + 1) / 6)"),
        the_shift_is_of_b_over_a=("(a[:, None] - b).ravel()", "(b[:, None] - a).ravel()"),
    ),
    *mistakes(
        "bench/statistics.py",
        INTERVALS,
        the_baseline_is_the_numerator=("estimate_paired(logs[0] - logs[1])", "estimate_paired(logs[1] - logs[0])"),
        the_bounds_are_swapped=("        low=low,\n        high=high,\n", "        low=high,\n        high=low,\n"),
        the_baseline_is_the_first_one=("by_name.pop(baseline, None)", "by_name.pop(next(iter(by_name)), None)"),
        resamples_have_the_wrong_median=("drawn[:, len(values) // 2]", "drawn[:, len(values) // 2 - 1]"),
        the_spread_is_of_a_population=("values.std(ddof=1)", "values.std(ddof=0)"),
        turns_do_not_pair=("if interleaved else estimate_unpaired", "if not interleaved else estimate_unpaired"),
    ),
]
