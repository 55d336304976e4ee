"""Mistakes in what is studied across processes: collectives, their transports, wrappers, shards."""

from tests.mutations.mistake import mistakes

BATCHNORM = ("tests/parallel/test_sync_batchnorm.py", "-k", "whole_batch or options or differences")
CONTRACT = ("tests/parallel/test_data_parallel.py",)
SHARDED = ("tests/parallel/test_sharded_optimizer.py",)
FSDP = ("tests/parallel/test_fsdp.py",)
TRAINING = ("tests/parallel/test_data_parallel.py", "-k", "five_steps")

MISTAKES = [
    *mistakes(
        "lab/runs/store.py",
        ("tests/lab/test_measure.py", "-k", "count_twice"),
        rows_of_a_broken_attempt_count=('rows.pop(record["point"], None)', "pass"),
    ),
    *mistakes(
        "parallel/data_parallel/overlapped.py",
        CONTRACT,
        gradients_in_buckets_are_sums=("view.div_(self._divisor)", "view.div_(1)"),
        a_bucket_begins_one_gradient_early=(
            "bucket.missing = len(bucket.parameters)",
            "bucket.missing = len(bucket.parameters) - 1",
        ),
        the_last_bucket_is_not_waited_for=("for wait in self._waits:", "for wait in self._waits[:-1]:"),
        kept_gradients_are_overwritten=("if bucket.is_kept():", "if False:"),
        the_first_bucket_is_as_large_as_the_others=("min(first_bucket_mb, bucket_mb))", "bucket_mb)"),
    ),
    *mistakes(
        "parallel/data_parallel/layout.py",
        CONTRACT,
        gradients_of_inputs_are_averaged=("parameter.grad = gradient = gradient.clone()", "pass"),
    ),
    *mistakes(
        "parallel/data_parallel/hooks.py",
        CONTRACT,
        later_hooks_come_later=("len(hooks) > 1:", "False:"),
        two_wrappers_average=("other.is_superseded = True", "pass"),
    ),
    *mistakes(
        "parallel/data_parallel/synchronous.py",
        TRAINING,
        naive_leaves_out_a_parameter=(
            "in self._parameters_in_order:\n            self",
            "in self._parameters_in_order[1:]:\n            self",
        ),
        flat_sums=('self._reducer.run(flat, "mean")', 'self._reducer.run(flat, "sum")'),
    ),
    *mistakes(
        "parallel/data_parallel/reducer.py",
        CONTRACT,
        gradients_by_torch_are_sums=("vector.div_(dist.get_world_size(self.group))", "pass"),
    ),
    *mistakes(
        "parallel/data_parallel/consistency.py",
        CONTRACT,
        ranks_keep_their_own_parameters=("tuple(tensor.detach() for", "tuple(tensor.detach().clone() for"),
        differing_models_are_accepted=("if most != fewest:", "if most < fewest:"),
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
