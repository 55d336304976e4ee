"""Numbers as people read them."""

import pytest

from labkit.lab.units import (
    column,
    format_bytes,
    format_estimate,
    format_flops,
    format_number,
    format_rate,
    format_seconds,
    join_words,
    label,
)

NUMBERS = {
    format_seconds: {
        1.5: "1.5 s",
        0.00123: "1.23 ms",
        4.56e-6: "4.56 µs",
        0: "0 s",
        125: "2 min 5 s",
        0.999: "999 ms",
    },
    format_estimate: {53: "50 s", 125: "2 min", 503: "8 min"},
    format_bytes: {
        0: "0 B",
        1023: "1023 B",
        65536: "64 KiB",
        1.5 * 2**30: "1.5 GiB",
        2**20: "1 MiB",
    },
    format_rate: {1.5e9: "1.5 GB/s", 200e6: "200 MB/s", 12: "12 B/s"},
    format_flops: {2.5e9: "2.5 GFLOP", 1.2e15: "1.2 PFLOP", 999: "999 FLOP", 524288: "524 kFLOP"},
    format_number: {0.78412: "0.784", 1822.4: "1,822", -12.34: "-12.3", 2e12: "2e+12"},
}


@pytest.mark.parametrize("form", NUMBERS, ids=lambda form: form.__name__)
def test_numbers_have_units_and_three_digits(form):
    assert [form(value) for value in NUMBERS[form]] == list(NUMBERS[form].values())


def test_a_missing_value_has_no_number():
    assert {show(float("nan")) for show in (format_seconds, format_bytes, format_rate)} == {
        "not measured"
    }


def test_words_are_joined_as_in_a_sentence():
    assert [join_words(words) for words in ([], ["a"], ["a", "b"], list("abc"))] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]
    assert join_words(["ring, zigzag", "one rank"]) == "ring, zigzag; one rank"


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("eager_forward_ms", "eager forward (ms)"),
        ("memory_gib", "memory (GiB)"),
        ("size_mb", "size (MB)"),
        ("n_parameters", "parameters"),
        ("way", "alternative"),
    ],
)
def test_a_columns_title_has_the_unit_of_its_cells(name, title):
    assert column(name).title == title


def test_counts_are_labeled_by_a_plural():
    counts = {"world_size": 1, "heads": 4, "micro_batches": 1, "epochs": 3, "validation_loss": 1}
    labels = [label(name, value) for name, value in counts.items()]
    assert labels == ["1 rank", "4 heads", "1 micro-batch", "3 epochs", "validation loss 1"]


def test_names_are_spelled_and_what_a_reader_looks_for_is_not():
    assert label("algorithm", "one_shot") == "one shot"
    for name in ("my_train.py:24", "aten::_softmax", "layer_norm.weight", "max_len=4"):
        assert label("line", name) == name
