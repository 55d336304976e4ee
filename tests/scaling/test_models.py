"""Models by name and from a config.json."""

import json

import pytest

from labkit.costs.transformer import SIZES, n_parameters
from labkit.scaling.model import parameters
from labkit.scaling.model_config import LARGEST_BYTES, read_model
from labkit.scaling.named_models import NAMED, find_model, is_bare_size

# as their makers print them, in billions
PRINTED = {
    **{"llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-2-70b": 68.98, "llama-3-8b": 8.03, "llama-3-70b": 70.55},
    **{
        "llama-3-405b": 405.85,
        "llama-3.2-1b": 1.236,
        "llama-3.2-3b": 3.21,
        "qwen-2.5-0.5b": 0.494,
        "qwen-2.5-7b": 7.62,
    },
    **{"qwen-2.5-14b": 14.77, "qwen-2.5-32b": 32.76, "qwen-2.5-72b": 72.71, "qwen-3-8b": 8.19, "qwen-3-14b": 14.77},
    **{"mistral-7b": 7.24, "mistral-large": 122.6, "gpt-3-175b": 174.6, "mpt-7b": 6.65, "mpt-30b": 29.95},
}
LLAMA = {
    **{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False},
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}


@pytest.mark.parametrize("name", PRINTED)
def test_parameters_are_those_that_are_printed(name):
    assert parameters(NAMED[name]) / 1e9 == pytest.approx(PRINTED[name], rel=2e-3)


@pytest.mark.parametrize("name", SIZES)
def test_our_own_sizes_are_the_ones_that_are_trained(name):
    assert parameters(find_model(name)) == n_parameters(SIZES[name])


@pytest.mark.parametrize(
    ("written", "name"),
    [
        *[("meta-llama/Llama-3.1-8B", "llama-3-8b"), ("Llama 2 7B", "llama-2-7b"), ("llama3-70b", "llama-3-70b")],
        *[("Qwen/Qwen2.5-7B-Instruct", "qwen-2.5-7b"), ("GPT-3 175B", "gpt-3-175b"), ("10b", "10B")],
        *[("meta-llama/Llama-2-13b-hf", "llama-2-13b"), ("llama-3.2-1B", "llama-3.2-1b"), ("mini", "mini")],
    ],
)
def test_names_as_people_write_them(written, name):
    assert find_model(written) is NAMED[name]


def test_an_unknown_name_has_the_nearest_ones():
    with pytest.raises(ValueError, match=r"unknown model 'lama-3-8b'; did you mean .*llama-3-8b"):
        find_model("lama-3-8b")


def _written(folder, content):
    path = folder / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def test_a_config_is_the_model_of_that_name(tmp_path):
    model = read_model(_written(tmp_path, LLAMA))
    assert parameters(model) == parameters(NAMED["llama-3-8b"])
    assert model.groups == 8
    assert read_model(tmp_path) == model


def test_a_config_of_gpt2_is_tied_and_has_four_times_the_width(tmp_path):
    model = read_model(_written(tmp_path, GPT2))
    assert (model.ffn, model.ffn_gated, model.tied, model.groups) == (3072, False, True, 12)


HOSTILE = {
    "another architecture": LLAMA | {"model_type": "mixtral"},
    "no architecture": {"hidden_size": 4096},
    "a list": [1, 2],
    "a text for a number": LLAMA | {"hidden_size": "4096"},
    "a flag for a number": LLAMA | {"num_hidden_layers": True},
    "not a number": b'{"model_type": "llama", "hidden_size": NaN}',
    "a number of a million digits": b'{"model_type": "llama", "hidden_size": ' + b"9" * 10**6 + b"}",
    "negative": LLAMA | {"num_hidden_layers": -1},
    "zero": LLAMA | {"vocab_size": 0},
    "enormous": LLAMA | {"hidden_size": 10**12},
    "heads that do not divide": LLAMA | {"num_attention_heads": 33},
    "heads of their own width": LLAMA | {"head_dim": 256},
    "another type of flag": LLAMA | {"tie_word_embeddings": "no"},
    "missing": {name: value for name, value in LLAMA.items() if name != "vocab_size"},
    "nested": b"[" * 500_000,
    "empty": b"",
    "not utf-8": b"\xff\xfe\x00{",
    "a pickle": b"\x80\x04\x95",
    "huge": b" " * (LARGEST_BYTES + 1),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_in_one_line(case, tmp_path):
    with pytest.raises(ValueError, match="expected") as refused:
        read_model(_written(tmp_path, HOSTILE[case]))
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 400


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        read_model(tmp_path)
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="there is no file"):
        read_model(tmp_path)


@pytest.mark.parametrize(("size", "name"), [("7B", "llama-2-7b"), ("8b", "llama-3-8b"), ("175b", "gpt-3-175b")])
def test_a_bare_size_is_the_first_model_of_that_size(size, name):
    assert is_bare_size(size)
    assert find_model(size).name == name
    assert not is_bare_size(name)


def test_a_size_that_nobody_published_is_refused_and_an_own_one_is_kept():
    assert find_model("2.7b").name == "2.7B"
    assert not is_bare_size("2.7b")
    with pytest.raises(ValueError, match="unknown model '9b'"):
        find_model("9b")
