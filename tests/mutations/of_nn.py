"""Mistakes in what is studied on one device: attention, its kernels, the Transformer."""

from tests.mutations.mistake import mistakes

ATTENTION = ("tests/nn/test_attention.py",)
INTERPRETED = ("tests/nn/test_flash_attention.py", "-k", "under_the_interpreter")
TILED = ("tests/nn/test_tiled_attention.py",)
TRANSFORMER = ("tests/nn/test_transformer.py",)

MISTAKES = [
    *mistakes(
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
    *mistakes(
        "nn/tiled_attention.py",
        TILED,
        the_gradient_of_q_is_forgotten_between_blocks=(
            "grad_q[:, rows].baddbmm_(ds, k_block)",
            "grad_q[:, rows] = torch.bmm(ds, k_block)",
        ),
        the_diagonal_block_is_skipped_in_backward=(
            "return columns.start // side * side if",
            "return columns.start // side * side + side if",
        ),
    ),
    *mistakes(
        "nn/attention.py",
        ATTENTION,
        the_oracle_sees_one_key_too_many=(".tril()", ".tril(1)"),
        the_oracle_scales_by_d=("1.0 / math.sqrt(q.shape[-1])", "1.0 / q.shape[-1]"),
    ),
    *mistakes(
        "nn/transformer.py",
        TRANSFORMER,
        rotation_turns_the_wrong_way=("even * cosines - odd * sines", "even * cosines + odd * sines"),
        the_feed_forward_part_replaces_the_stream=("x = x + self.feed_forward(", "x = self.feed_forward("),
        tokens_see_the_future=("v, True)  #", "v, False)  #"),
        a_norm_sums_squares=("wide.square().mean(", "wide.square().sum("),
        checkpointed_segments_lack_a_layer=(
            "start + self.checkpoint_segment, use_reentrant",
            "start + max(1, self.checkpoint_segment - 1), use_reentrant",
        ),
    ),
    *mistakes(
        "nn/training.py",
        TRANSFORMER,
        targets_are_the_inputs=("tokens[:, 1:].contiguous()", "tokens[:, :-1].contiguous()"),
    ),
    *mistakes(
        "nn/flash_kernels.py",
        INTERPRETED,
        the_kernel_does_not_rescale_its_sum=("row_sum = row_sum * rescale +", "row_sum = row_sum +"),
        the_kernel_hides_the_diagonal=("(columns <= q_start +", "(columns < q_start +"),
    ),
    *mistakes(
        "nn/flash_backward_kernels.py",
        INTERPRETED,
        delta_is_added_in_the_kernel=("(grad_p - delta[None, :])", "(grad_p + delta[None, :])"),
        the_ragged_end_gives_no_gradient=(
            "        full_end, queries, k_start,",
            "        full_end, full_end, k_start,",
        ),
    ),
]
