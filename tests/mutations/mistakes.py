"""The mistakes: a piece of a file, what is written in its place, and the tests that should fail.

The mistakes are those that a change makes: a contribution left out, a wrong sign, an off-by-one, a missing wait.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    """In `file`, below labkit/, `new` stands for the only `old`; pytest with the arguments `tests` should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _all(file: str, tests: tuple[str, ...], **changes: tuple[str, str]) -> list[Mistake]:
    return [Mistake(name.replace("_", " "), file, old, new, tests) for name, (old, new) in changes.items()]


EXACT = ("tests/parallel/test_collectives.py", "-k", "whole_numbers")
LAYOUTS = ("tests/parallel/test_collectives.py", "-k", "layout or overflow")
TRAINING = ("tests/parallel/test_data_parallel.py", "-k", "five_steps")
CONTRACT = ("tests/parallel/test_data_parallel.py",)
BATCHNORM = ("tests/parallel/test_sync_batchnorm.py", "-k", "whole_batch or options or differences")
INTERVALS = ("tests/bench/test_intervals.py", "tests/bench/test_statistics.py")
SUMS = ("tests/bench/test_exact_sums.py",)
TILED = ("tests/nn/test_tiled_attention.py",)

MISTAKES = [
    *_all(
        "parallel/phases.py",
        EXACT,
        ring_never_divides=("last = divisor if divisor and s == p - 2 else 1", "last = 1"),
        butterfly_sends_the_wrong_chunk=(
            "Step(pieces[target][i], target, pieces[r]",
            "Step(pieces[source][i], target, pieces[r]",
        ),
        one_shot_leaves_out_a_rank=("for other in others:", "for other in others[1:]:"),
        a_folded_rank_is_not_added=("inward=True, add=True)", "inward=True, add=False)"),
        the_wrong_half_is_kept=("kept = k & -distance  #", "kept = ~k & -distance  #"),
    ),
    *_all(
        "parallel/collectives.py",
        EXACT,
        doubling_divides_a_round_early=("is_last = 2 * distance == len(ranks)", "is_last = 4 * distance == len(ranks)"),
    ),
    *_all(
        "parallel/reduction.py",
        LAYOUTS,
        float16_divides_last=("tensor.dtype == torch.float16:", "tensor.dtype == torch.bfloat16:"),
        a_copy_is_not_copied_back=("if kind is None and", "if kind is not None and"),
    ),
    *_all(
        "parallel/data_parallel/during_backward.py",
        CONTRACT,
        gradients_in_buckets_are_sums=("view.div_(self.world_size)", "view.div_(1)"),
        a_bucket_begins_one_gradient_early=(
            "bucket.missing = len(bucket.indices)",
            "bucket.missing = len(bucket.indices) - 1",
        ),
        the_last_bucket_is_not_waited_for=("for wait in self._waits:", "for wait in self._waits[:-1]:"),
        the_last_gradient_is_not_waited_for=("for _, wait in self._begun:", "for _, wait in self._begun[:-1]:"),
    ),
    *_all(
        "parallel/data_parallel/buckets.py",
        CONTRACT,
        views_of_a_bucket_overlap=("offset += parameter.numel()", "offset += parameter.numel() - 1"),
        the_first_bucket_is_as_large_as_the_others=("else min(first_bucket_mb, bucket_mb)", "else bucket_mb"),
    ),
    *_all(
        "parallel/data_parallel/after_backward.py",
        TRAINING,
        naive_leaves_out_a_parameter=(
            "for parameter in self._parameters_in_order:\n            self._average",
            "for parameter in self._parameters_in_order[1:]:\n            self._average",
        ),
        flat_sums=('self._average.run(flat, "mean")', 'self._average.run(flat, "sum")'),
    ),
    *_all(
        "parallel/sync_batchnorm.py",
        BATCHNORM,
        means_of_ranks_do_not_differ=("(m2s + count * (means - mean).square()).sum(0)", "m2s.sum(0)"),
        running_variance_is_biased=("variance = m2 / (total - 1)", "variance = m2 / total"),
        backward_sums_over_its_own_rank=("        _sum_over_ranks(sums, ctx.group)\n", ""),
        what_the_center_lacks_has_the_wrong_sign=(
            "constant.addcmul_(slope, rest, value=-1)",
            "constant.addcmul_(slope, rest, value=1)",
        ),
        ranks_weigh_alike=("mean = (count * means).sum(0) / total", "mean = means.mean(0)"),
    ),
    *_all(
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
    *_all(
        "bench/statistics.py",
        INTERVALS,
        small_differences_are_claimed=("ratio >= 1 + LEAST_RELEVANT_DIFFERENCE", "ratio >= 1"),
        the_fastest_rank_counts=("[value].max().reset_index()", "[value].min().reset_index()"),
        many_comparisons_are_judged_one_by_one=(
            'adjusted_p = adjusted(ratios["p"].to_numpy(dtype=float))',
            'adjusted_p = ratios["p"].to_numpy(dtype=float)',
        ),
    ),
    *_all(
        "bench/exact_sums.py",
        SUMS,
        the_last_rank_adds_nothing=("min(first + at_once, ranks))", "min(first + at_once, ranks - 1))"),
        a_part_may_be_zero=("% modulus + 1).double()", "% modulus).double()"),
        no_number_is_no_deviation=("return math.inf if largest.isnan()", "return 0.0 if largest.isnan()"),
        the_rest_of_a_tensor_is_not_compared=("+ [(rest, period[: len(rest)])]", "+ [(rest[:0], period[:0])]"),
    ),
    *_all(
        "nn/tiled_attention.py",
        TILED,
        a_query_sees_one_key_too_many=("rows.start - columns.start + 1)", "rows.start - columns.start + 2)"),
        delta_has_the_wrong_sign=(
            "_rowsum_of_product(grad_output, output, dtype).neg_()",
            "_rowsum_of_product(grad_output, output, dtype)",
        ),
        the_sum_is_not_rescaled=("row_sum.mul_(rescale).add_(", "row_sum.add_("),
        the_last_key_is_not_visited=("min(k.shape[1], rows.stop) if", "min(k.shape[1], rows.stop - 1) if"),
        the_gradient_of_k_is_not_scaled=("grad_k_block.mul_(scale)", "grad_k_block"),
    ),
]
