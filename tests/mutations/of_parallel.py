"""Mistakes in what is studied across processes: collectives, their transports, wrappers, shards."""

from tests.mutations.mistake import mistakes

BATCHNORM = ("tests/parallel/test_sync_batchnorm.py", "-k", "whole_batch or options or differences")
BOARDS = ("tests/parallel/test_boards.py",)
CONTRACT = ("tests/parallel/test_data_parallel.py",)
EXACT = ("tests/parallel/test_collectives.py", "-k", "whole_numbers")
LAYOUTS = ("tests/parallel/test_collectives.py", "-k", "layout or overflow")
PHASES = ("tests/parallel/test_phases.py",)
SHARDED = ("tests/parallel/test_sharded_optimizer.py",)
FSDP = ("tests/parallel/test_fsdp.py",)
SHARED_MEMORY = ("tests/parallel/test_shared_transport.py",)
SWAPS = ("tests/parallel/test_swaps.py",)
TRAINING = ("tests/parallel/test_data_parallel.py", "-k", "five_steps")

MISTAKES = [
    *mistakes(
        "lab/runs/store.py",
        ("tests/lab/test_measure.py", "-k", "count_twice"),
        rows_of_a_broken_attempt_count=('rows.pop(record["point"], None)', "pass"),
    ),
    *mistakes(
        "parallel/phases.py",
        EXACT,
        ring_never_divides=("(divisor, end) if divisor and s == p - 2", "(1, end) if divisor and s == p - 2"),
        butterfly_sends_the_wrong_chunk=(
            "steps.append(Step(pieces[target][i], target,",
            "steps.append(Step(pieces[source][i], target,",
        ),
        a_folded_rank_is_not_added=("inward=True, add=True)", "inward=True, add=False)"),
        the_wrong_half_is_kept=("kept = k & -distance  #", "kept = ~k & -distance  #"),
    ),
    *mistakes(
        "parallel/phases.py",
        PHASES,
        a_shard_that_goes_elsewhere_misses_ranks=("if into is None or source == first else (into, None)", ""),
    ),
    *mistakes(
        "parallel/collectives.py",
        EXACT,
        doubling_divides_a_round_early=("is_last = 2 * distance == len(ranks)", "is_last = 4 * distance == len(ranks)"),
    ),
    *mistakes(
        "parallel/reduction.py",
        LAYOUTS,
        float16_divides_last=("tensor.dtype == torch.float16:", "tensor.dtype == torch.bfloat16:"),
        a_copy_is_not_copied_back=("if kind is None and", "if kind is not None and"),
    ),
    *mistakes(
        "parallel/data_parallel/during_backward.py",
        CONTRACT,
        gradients_in_buckets_are_sums=("view.div_(self.world_size)", "view.div_(1)"),
        a_bucket_begins_one_gradient_early=(
            "bucket.missing = len(bucket.indices)",
            "bucket.missing = len(bucket.indices) - 1",
        ),
        the_last_bucket_is_not_waited_for=("for wait in self._waits:", "for wait in self._waits[:-1]:"),
        the_last_gradient_is_not_waited_for=(
            "for gradient, sent, wait in self._begun:",
            "for gradient, sent, wait in self._begun[:-1]:",
        ),
    ),
    *mistakes(
        "parallel/data_parallel/during_backward.py",
        CONTRACT,
        what_autograd_still_reads_is_sent=("gradient.clone() if shares_memory(gradient) else gradient", "gradient"),
    ),
    *mistakes(
        "parallel/data_parallel/layout.py",
        CONTRACT,
        gradients_of_inputs_are_averaged=("parameter.grad = gradient = gradient.clone()", "pass"),
    ),
    *mistakes(
        "parallel/data_parallel/hooks.py",
        CONTRACT,
        later_hooks_come_later=("if next(reversed(hooks)) != handle.id:", "if False:"),
        two_wrappers_average=("                older._supersede()", "                pass"),
    ),
    *mistakes(
        "parallel/data_parallel/buckets.py",
        CONTRACT,
        views_of_a_bucket_overlap=("offset += parameter.numel()", "offset += parameter.numel() - 1"),
        the_first_bucket_is_as_large_as_the_others=("else min(first_bucket_mb, bucket_mb)", "else bucket_mb"),
    ),
    *mistakes(
        "parallel/data_parallel/after_backward.py",
        TRAINING,
        naive_leaves_out_a_parameter=(
            "for parameter in self._parameters_in_order:\n            self._average",
            "for parameter in self._parameters_in_order[1:]:\n            self._average",
        ),
        flat_sums=('self._average.run(flat, "mean")', 'self._average.run(flat, "sum")'),
    ),
    *mistakes(
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
    *mistakes(
        "parallel/transport/contract.py",
        EXACT,
        one_shot_leaves_out_a_rank=("for other in others:", "for other in others[1:]:"),
    ),
    *mistakes(
        "parallel/transport/process_group.py",
        EXACT,
        a_slot_is_written_before_it_was_added=("if number >= depth:", "if number > depth:"),
        the_last_messages_are_not_waited_for=("for started in in_flight:", "for started in list(in_flight)[:-1]:"),
    ),
    *mistakes(
        "parallel/transport/messages.py",
        SHARED_MEMORY,
        notes_are_written_before_they_were_read=(
            "oldest = self._sent[target] - NOTES  #",
            "oldest = self._sent[target] - 2 * NOTES  #",
        ),
        slots_are_written_before_they_were_read=(
            "                if not self._is_taken(target, number, wait=wait):\n                    return None",
            "                self._is_taken(target, number, wait=False)",
        ),
        what_was_sent_by_reference_is_not_waited_for=("while self._referenced:", "while False:"),
    ),
    *mistakes(
        "parallel/transport/swaps.py",
        SWAPS,
        one_slot_serves_all_swaps=("self._turns[other] = 1 - turn", "self._turns[other] = turn"),
        a_swap_is_read_at_once=("while take():", "while False:"),
    ),
    *mistakes(
        "parallel/transport/boards.py",
        BOARDS,
        one_board_serves_all_shows=("dtype = number & 1,", "dtype = number & 0,"),
        the_last_rank_is_not_awaited=("if arrived == self._world_size:", "if arrived >= self._world_size - 1:"),
    ),
    *mistakes(
        "parallel/core/core.cpp",
        SWAPS,
        one_compiled_slot_serves_all_swaps=("turns[other] = 1 - turn;", "turns[other] = turn;"),
    ),
    *mistakes(
        "parallel/core/core.cpp",
        SHARED_MEMORY,
        compiled_notes_are_written_before_they_were_read=(
            "sent[move.target] - notes}",
            "sent[move.target] - 2 * notes}",
        ),
    ),
    *mistakes(
        "parallel/core/core.cpp",
        BOARDS,
        one_compiled_board_serves_all_shows=(
            "(number & 1) * (LINE + most_shown)",
            "(number & 0) * (LINE + most_shown)",
        ),
    ),
    *mistakes(
        "parallel/core/core.cpp",
        EXACT,
        a_compiled_mean_of_boards_is_a_sum=("other == p - 1 ? divisor : 1", "1"),
    ),
    *mistakes(
        "parallel/data_parallel/averaging.py",
        CONTRACT,
        gradients_by_torch_are_sums=("vector.div_(dist.get_world_size(self.group))", "pass"),
    ),
    *mistakes(
        "parallel/channel.py",
        CONTRACT,
        the_thread_is_not_waited_for=("        self._is_done.wait()\n", ""),
    ),
    *mistakes(
        "parallel/data_parallel/replicas.py",
        CONTRACT,
        ranks_keep_their_own_parameters=(
            "detached := [tensor.detach() for",
            "detached := [tensor.detach().clone() for",
        ),
        differing_models_are_accepted=("if most != fewest:", "if most < fewest:"),
    ),
    *mistakes(
        "parallel/sharding/partition.py",
        SHARDED,
        the_last_element_of_a_parameter_is_nobodys=("min(high - at, numel)", "min(high - at, numel - 1)"),
    ),
    *mistakes(
        "parallel/sharding/share.py",
        SHARDED,
        a_share_gets_gradients_of_another=(
            "flat_view(gradient_in_layout(parameter))[piece.start : piece.stop]",
            "flat_view(gradient_in_layout(parameter))[: piece.stop - piece.start]",
        ),
    ),
    *mistakes(
        "parallel/sharding/gathering.py",
        SHARDED,
        ranks_below_send_nothing=("if other != rank for pair", "if other > rank for pair"),
    ),
    *mistakes(
        "parallel/sharding/flat.py",
        FSDP,
        gradients_of_earlier_passes_are_lost=("view.copy_(full.grad if kept is None", "view.copy_(full.grad if True"),
        what_was_given_back_can_be_read=("    torch.autograd.graph.increment_version(self.full)\n", "    pass\n"),
        shards_get_sums=('vector, "mean", sizes=self.sizes', 'vector, "sum", sizes=self.sizes'),
    ),
    *mistakes(
        "parallel/sharding/schedule.py",
        FSDP,
        parameters_are_kept_after_backward=(
            "            unit.release()\n        self._keeps",
            "            pass\n        self._keeps",
        ),
        nothing_is_gathered_ahead=("[: self.prefetch]", "[:0]"),
    ),
    *mistakes(
        "parallel/sharding/gradients.py",
        FSDP,
        different_units_go_unnoticed=("!= found[-2] ** 2", "< 0"),
        norms_are_not_averaged=("        self._average_replicated(has_gradient)\n", ""),
    ),
    *mistakes(
        "parallel/sharding/reduce_scatter_ddp.py",
        FSDP,
        later_passes_replace_gradients=("flat_view(share.grad).add_(part)", "flat_view(share.grad).copy_(part)"),
        gradients_are_sums=("self.world_size, out=part", "1, out=part"),
    ),
    *mistakes(
        "parallel/sharding/norms.py",
        FSDP,
        each_rank_clips_by_its_own_norm=("    all_gather(norms, group)\n", ""),
    ),
    *mistakes(
        "parallel/sharding/checkpoint.py",
        SHARDED,
        states_are_joined_backwards=("for state in parts.values()]", "for state in reversed(parts.values())]"),
    ),
]
