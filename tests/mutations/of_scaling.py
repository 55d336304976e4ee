"""Mistakes in predictions: model, communication, memory, intervals, search."""

from tests.mutations.mistake import mistakes

LAYOUT = ("tests/scaling/test_layout.py", "tests/scaling/test_step_time.py")
LITERATURE = ("tests/scaling/test_intervals.py", "tests/scaling/test_literature.py", "tests/scaling/test_published.py")
MEMORY = ("tests/scaling/test_published.py", "tests/scaling/test_literature.py")
SEARCH = ("tests/scaling/test_search.py",)
STEP_TIME = ("tests/scaling/test_step_time.py", "tests/scaling/test_literature.py", "tests/scaling/test_published.py")

MISTAKES = [
    *mistakes(
        "scaling/model.py",
        STEP_TIME,
        grouped_keys_are_as_wide_as_queries=(
            "return model.hidden * model.kv_heads / model.heads",
            "return model.hidden * model.heads / model.heads",
        ),
        scores_count_once=("attention = 12 * model.layers", "attention = 6 * model.layers"),
    ),
    *mistakes(
        "scaling/compute.py",
        STEP_TIME,
        a_product_is_half_its_flops=("2 * m * n * k / rate", "m * n * k / rate"),
        all_scores_count_where_half_are_seen=("tiled = 0.5 * flops", "tiled = flops"),
        backward_has_one_product=(" + product_s(runs, constants, k, n, m, fp8=fp8)", ""),
    ),
    *mistakes(
        "scaling/communication.py",
        STEP_TIME,
        an_all_reduce_is_one_half_ring=("moved = 2 * n_bytes *", "moved = n_bytes *"),
        rings_have_the_network_to_themselves=("* local / runs.gpus_per_node", ""),
    ),
    *mistakes(
        "scaling/pipeline.py",
        STEP_TIME,
        interleaving_leaves_the_bubble=("- slowest) / runs.vp", "- slowest)"),
        the_bubble_has_a_stage_too_many=("(stage_s.sum(axis=1) - slowest)", "stage_s.sum(axis=1)"),
    ),
    *mistakes(
        "scaling/step_time.py",
        STEP_TIME,
        hidden_communication_is_added=("return seconds - hidden, hidden", "return seconds + hidden, hidden"),
        gradients_are_not_scattered=("3 * once, 0.0)", "2 * once, 0.0)"),
        replicas_update_all_parameters=(
            'runs.shard == "none", 1.0, runs.dp * runs.cp)',
            'runs.shard == "none", 1.0, 1.0)',
        ),
    ),
    *mistakes(
        "scaling/memory.py",
        MEMORY,
        a_stage_holds_a_micro_batch_too_few=("np.minimum(pp - index,", "np.minimum(pp - index - 1,"),
        sharded_gradients_are_whole=(
            '("zero2", "zero3", "hsdp"))[:, None], sharded',
            '("zero3", "hsdp"))[:, None], sharded',
        ),
        sequence_parallelism_saves_nothing=("around * runs.sequence_share +", "around +"),
        the_optimizer_has_one_state=("np.where(low, 4.0, 12.0)", "np.where(low, 4.0, 8.0)"),
    ),
    *mistakes(
        "scaling/intervals.py",
        LITERATURE,
        the_upper_quantile_is_one_row_too_low=("(count + 1))) - 1, count - 1)", "(count + 1))) - 2, count - 1)"),
        intervals_shrink_beyond_the_data=("BEYOND * logs, logs)", "logs / BEYOND, logs)"),
        few_rows_have_their_own_quantiles=("if rows.sum() >= ENOUGH:", "if rows.any():"),
    ),
    *mistakes(
        "scaling/prediction.py",
        LITERATURE,
        what_is_too_large_fits=("-1.702 * np.clip", "1.702 * np.clip"),
        the_ends_of_intervals_are_mixed_up=("high_80=seconds * high_80", "high_80=seconds * low_80"),
    ),
    *mistakes(
        "scaling/search.py",
        SEARCH,
        the_slowest_layout_comes_first=(
            'np.argsort(preference, kind="stable")',
            'np.argsort(-preference, kind="stable")',
        ),
    ),
    *mistakes(
        "scaling/layout.py",
        LAYOUT,
        micro_batches_are_sequences=("(self.dp * self.micro_batch)\n", "self.dp\n"),
        heads_need_not_divide=("if model.heads % layout.tp:", "if layout.tp % model.heads:"),
    ),
]
