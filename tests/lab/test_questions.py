"""Published measurements and questions: none is lost, each has an id and an answer in some lab."""

import re

import pytest

from labkit.lab.project import checkout, reference_directory
from labkit.studies import LABS, load_lab

# The questions under which each file of data/reference is drawn or told, by lab.
ANSWERED_IN = {
    "allreduce_gloo_nccl": {"all_reduce": ["size_and_ranks", "published_trends"]},
    "allreduce_ring_vs_butterfly": {"all_reduce": ["ring_against_torch", "published_trends"]},
    "allreduce_ring_vs_torch": {"all_reduce": ["ring_against_torch", "published_trends"]},
    "attention_compile": {"attention": ["compiled", "published_trends"]},
    "attention_eager": {"attention": ["time_growth", "memory_growth", "published_trends"]},
    "ddp_bucketed_xl_2gpu": {
        "gradient_buckets": ["waiting", "bucket_size", "batch_and_length", "model", "published_trends"]
    },
    "ddp_compare_resnet50": {"data_parallel": ["fastest", "bucket_size", "published_trends"]},
    "end_to_end": {
        "end_to_end": ["step_times", "warmup", "published_trends"],
        "kernels": ["profiler_and_clock", "published_trends"],
    },
    "flash_attention": {"flash_attention": ["crossover", "triton_kernel", "published_trends"]},
    "memory_peaks": {"memory": ["peak_by_context", "published_peaks", "published_trends"]},
    "mixed_precision": {"precision": ["autocast_speed", "published_trends"]},
    "profile_kernels": {
        "kernels": ["beside_matmul", "matmul_share", "softmax_in_attention", "published_trends"],
        "precision": ["accumulation"],
    },
    "transformer_compile": {"end_to_end": ["compile", "published_trends"]},
    "cifar100_training_2gpu": {"cifar100": ["same_training", "time", "memory", "published_trends"]},
    "sharded_training_2gpu": {"sharding": ["published_trends"]},
    "sync_batchnorm": {"sync_batchnorm": ["price", "against_torch", "memory", "published_trends"]},
}
FILES = sorted(path.stem for path in reference_directory().glob("*.csv"))

# Ids stay the same for ever: links and earlier reports name them. New ones may be added.
ALL_IDS = {
    "limits": "products memory calls threads exchange roofline regimes",
    "end_to_end": "step_times warmup predicted compile published_trends",
    "kernels": "profiler_and_clock largest_operator beside_matmul matmul_share softmax_in_attention published_trends",
    "precision": "accumulation dtypes layer_norm autocast_speed published_trends",
    "memory": (
        "peak_by_context where_it_goes residual_stream largest_allocations saved_by_a_block checkpointing "
        "largest_model counted_against_measured published_peaks published_trends"
    ),
    "attention": "time_growth memory_growth out_of_memory tiling compiled published_trends",
    "flash_attention": "crossover matmul_share peak_memory triton_kernel techniques published_trends",
    "all_reduce": (
        "size_and_ranks algorithms_against_torch ring_against_torch alpha_beta transports scheduling published_trends"
    ),
    "data_parallel": "fastest bucket_size overlap memory accumulation published_trends",
    "gradient_buckets": "waiting bucket_size batch_and_length model published_trends",
    "sharding": (
        "peaks formula fsdp_saving bytes zero_stage_1 time torch break_even gathers largest_model published_trends"
    ),
    "sync_batchnorm": "price split one_collective against_torch memory prediction published_trends",
    "cifar100": "learned same_training time memory sync_batchnorm published_trends",
    "this_machine": "gain ingredients predicted",
}


def _ids(lab):
    return [question.id for question in load_lab(lab).questions]


@pytest.mark.parametrize("file", FILES)
def test_every_published_measurement_belongs_to_questions_of_a_lab(file):
    assert file in ANSWERED_IN, f"{file}.csv belongs to no lab: name the questions that it is drawn under"
    for lab, questions in ANSWERED_IN[file].items():
        assert set(questions) <= set(_ids(lab))


@pytest.mark.parametrize("file", sorted(ANSWERED_IN))
def test_a_lab_reads_the_published_measurements_of_its_questions(file):
    for lab in ANSWERED_IN[file]:
        sources = (checkout() / "labkit" / "studies" / lab).glob("*.py")
        assert any(f"{file}.csv" in source.read_text() for source in sources)


def test_no_entry_is_of_a_file_that_is_gone():
    assert set(ANSWERED_IN) == set(FILES)


@pytest.mark.parametrize("lab", sorted(ALL_IDS))
def test_no_question_is_lost(lab):
    assert set(ALL_IDS[lab].split()) <= set(_ids(lab))


@pytest.mark.parametrize("lab", LABS)
def test_questions_of_a_lab_have_ids_of_their_own_that_fit_a_link(lab):
    ids = _ids(lab)
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", identifier) for identifier in ids)
