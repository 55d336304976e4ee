"""Files and names from the field: tables of runs, config.json, models and GPUs as people and
programs write them."""

import csv
import io
import json
import re

import pytest

from labkit.costs.transformer import SIZES, n_parameters
from labkit.scaling import DATA
from labkit.scaling.hardware import HARDWARE, find_hardware
from labkit.scaling.models import NAMED, find_model, read_model
from labkit.scaling.prediction import COLUMNS, predict_rows
from labkit.scaling.table import read_rows

GOOD = {
    "group": "mosaic",
    "gpu": "H100-SXM-80GB",
    "gpus": "8",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "vocab": "50368",
    "seq_len": "2048",
    "tp": "1",
    "pp": "1",
    "dp": "8",
    "shard": "zero3",
    "micro_batch": "4",
    "global_batch": "64",
    "ffn": "",
    "note": "",
}
WRONG = [
    ({"gpu": "Z9"}, "unknown GPU 'Z9'"),
    ({"gpus": "16"}, "is 8, and gpus is 16"),
    ({"heads": ""}, "expected heads to be stated"),
    ({"layers": "nan"}, "expected layers"),
    ({"hidden": "4.096"}, "expected hidden"),
    ({"dp": "1", "gpus": "1", "global_batch": ""}, "expected global_batch to be stated"),
    ({"tp": ""}, "expected tp to be stated"),
    ({"seq_len": "long"}, "expected seq_len"),
    ({"shard": "zero9"}, "expected shard to be 'none', 'zero1'"),
    ({"options": "fast"}, "expected options"),
    ({"shard": "hybrid FSDP"}, "expected shard to be 'none', 'zero1'"),
    ({"shard": "no fsdp"}, "expected shard to be 'none', 'zero1'"),
    ({"shard": "zero1 (DDP)"}, "expected shard to be 'none', 'zero1'"),
    ({"shard": "FSDP SHARD_GRAD_OP"}, "expected shard to be 'none', 'zero1'"),
    ({"recompute": "no per-op selective"}, "expected recompute to be 'none'"),
    ({"tied": "maybe"}, "expected tied"),
    ({"precision": "mxfp4"}, "expected precision to be 'bf16', 'fp16' or 'fp8', got 'mxfp4'"),
    ({"precision": "fp8", "gpu": "A100"}, "no fp8 matmuls"),
    ({"dp": "0"}, "expected dp"),
    (
        {"micro_batch": "3"},
        "8 sequences per replica cannot be divided over micro_batch = 3; the nearest divisor is 2",
    ),
    (
        {"layers": "100000", "hidden": "1000000", "heads": "1000"},
        "too far from every published run",
    ),
    (
        {"gpus": "1000000", "dp": "1000000", "global_batch": "4000000"},
        "too far from every published run",
    ),
    (
        {"layers": "900000000", "pp": "100000000", "gpus": "800000000"},
        "expected pp to be less than or equal to 512",
    ),
]


def _text(rows, separator=","):
    out = io.StringIO()
    writer = csv.DictWriter(
        out, list(rows[0]), delimiter=separator, lineterminator="\n", restval=""
    )
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _file(folder, content, name="rows.csv"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(("change", "reason"), WRONG, ids=str)
def test_a_wrong_row_is_refused_by_its_line_and_the_others_are_predicted(tmp_path, change, reason):
    columns = dict.fromkeys(("tied", "precision", "recompute", "options"), "")
    rows = read_rows(
        _file(tmp_path, _text([columns | GOOD, columns | GOOD | change, columns | GOOD]))
    )
    assert [row.line for row in rows] == [2, 3, 4]
    first, refused, last = predict_rows(rows)
    assert refused["step_s"] == ""
    assert [*refused] == [*first]
    assert reason in refused["note"]
    assert first == last
    assert float(first["step_low"]) < float(first["step_s"]) < float(first["step_high"])


PLAIN = _text([GOOD])
SPREADSHEETS = {
    "semicolons and a byte-order mark": ("\ufeff" + _text([GOOD], ";")).encode(),
    "a decimal comma": _text([GOOD | {"node_network_gbps": "1600,5"}], ";").encode(),
    "tabs": _text([GOOD], "\t").encode(),
    "carriage returns": PLAIN.replace("\n", "\r").encode(),
    "lines of commas only": (PLAIN + "," * len(GOOD) + "\n\n").encode(),
    "capital letters": PLAIN.replace("gpus", "GPUs").replace("hidden", "Hidden").encode(),
    "points before decimals": _text([GOOD | {"step_s": "0.500"}], ";").encode(),
    "spaces in the header": _text([GOOD]).replace("micro_batch", "micro batch").encode(),
    "floats": _text([GOOD | {"hidden": "4096.0"}]).encode(),
}


@pytest.mark.parametrize("case", SPREADSHEETS)
def test_tables_as_spreadsheets_write_them(case, tmp_path):
    (expected,) = predict_rows(read_rows(_file(tmp_path, PLAIN)))
    (predicted,) = predict_rows(read_rows(_file(tmp_path, SPREADSHEETS[case])))
    if case != "a decimal comma":
        for name in COLUMNS:
            assert predicted[name] == expected[name]
    assert float(predicted["step_s"]) == pytest.approx(float(expected["step_s"]), rel=0.2)


REFUSED = {
    "another table": (
        b"not,a,table\n1,2,3\n",
        "lacks the columns gpu, gpus.*first line has not, a, table",
    ),
    "a missing column": (PLAIN.replace("hidden", "width").encode(), "lacks the columns hidden"),
    "bytes": (b"\xff\xfe\x00gpu\xd8", "UTF"),
    "a workbook": (b"PK\x03\x04\x14\xe4", r"expected a CSV in UTF-8, and \S+rows.csv is none"),
    "only a header": (",".join(GOOD).encode(), "no rows"),
    "nothing": (b"", "no rows"),
    "a column twice": (PLAIN.replace("note", "hidden").encode(), "column hidden twice"),
    "predictions": (
        _text([GOOD | {"step_low": "1", "step_high": "2"}]).encode(),
        "output of labkit predict",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_files_are_refused_in_a_line(case, tmp_path):
    content, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason):
        read_rows(_file(tmp_path, content))


@pytest.mark.parametrize(
    ("change", "separator"),
    [
        ({"vocab": "50.000"}, ","),
        ({"hidden": "4,096"}, ","),
        ({"vocab": "50 368"}, ","),
        ({"step_s": "2.345"}, ";"),
        ({"hidden": "4,096"}, ";"),
        ({"vocab": "128,000 000"}, ";"),
    ],
)
def test_thousands_that_may_be_decimals_are_refused(change, separator, tmp_path):
    (row,) = read_rows(_file(tmp_path, _text([GOOD | change], separator)))
    assert " to be a " in row.refusal


def test_the_command_writes_predictions_and_names_refused_rows(tmp_path, command):
    table = _file(tmp_path, _text([GOOD | {"note": "größer"}, GOOD | {"gpu": "Z9"}]))
    status, _, complaints = command("predict", str(table), "--output", str(tmp_path / "out.csv"))
    assert status == 1
    assert "line 3: unknown GPU 'Z9'" in complaints
    written = list(csv.DictReader((tmp_path / "out.csv").open(encoding="utf-8")))
    assert [bool(row["step_s"]) for row in written] == [True, False]
    assert written[0]["published_note"] == "größer"
    for name, words in (("out.csv", "output of labkit predict"), ("none.csv", "No such file")):
        status, _, complaints = command("predict", str(tmp_path / name))
        assert (status, words in complaints, "Traceback" in complaints) == (2, True, False)


def test_a_refused_row_has_no_prediction_of_the_input(tmp_path):
    earlier = dict.fromkeys(COLUMNS[3:-1], "1") | {"step_s": "2", "step_low": "1", "note": "mine"}
    rows = [GOOD | earlier, GOOD | earlier | {"gpu": "Z9"}]
    predicted, refused = predict_rows(read_rows(_file(tmp_path, _text(rows))))
    assert [*refused] == [*predicted]
    assert [*refused][-len(COLUMNS) :] == [*COLUMNS]
    assert {refused[name] for name in COLUMNS[:-1]} == {""}
    assert (refused["measured_step_s"], refused["published_note"]) == ("2", "mine")


@pytest.mark.parametrize(
    ("gpu", "framework"), [("a100", "megatron"), ("A100-SXM-80GB", "megatron"), ("h100", "nemo")]
)
def test_megatron_is_that_of_2021_on_a100_alone(gpu, framework, tmp_path):
    (row,) = read_rows(_file(tmp_path, _text([GOOD | {"gpu": gpu, "framework": "megatron"}])))
    assert row.run.framework == framework


@pytest.mark.parametrize(
    ("framework", "assumption"),
    [("my trainer", "my trainer has no published runs"), ("FSDP2", "FSDP2 is like torchtitan")],
)
def test_a_row_of_any_framework_is_predicted(framework, assumption, tmp_path):
    rows = read_rows(_file(tmp_path, _text([GOOD | {"framework": framework}])))
    (row,) = predict_rows(rows)
    assert row["step_s"]
    assert f"assumed: {assumption}" in row["note"]


def test_a_measured_bandwidth_is_a_column(tmp_path):
    nodes = GOOD | {"gpus": "64", "dp": "64", "global_batch": "256"}
    slow = {**nodes, "measured_bus_bandwidth": "10"}
    fast = {**nodes, "measured_bus_bandwidth": ""}
    first, second = predict_rows(read_rows(_file(tmp_path, _text([slow, fast]))))
    assert float(first["step_s"]) > 1.3 * float(second["step_s"])


def test_torchtitans_selective_recomputation_keeps_less_than_megatrons(tmp_path):
    rows = [GOOD | {"recompute": "selective", "options": name} for name in ("", "op_recompute")]
    megatron, torchtitan = predict_rows(read_rows(_file(tmp_path, _text(rows))))
    assert float(torchtitan["peak_gib"]) < float(megatron["peak_gib"])
    assert torchtitan["step_s"] == megatron["step_s"]


def test_every_published_row_is_read():
    rows = read_rows(DATA / "training_runs.csv")
    # Two runs that ran out of memory had more stages than layers.
    refused = [(row.cells["status"], row.refusal[-14:]) for row in rows if row.run is None]
    assert refused == [("oom", "than 16 layers")] * 2
    frameworks = {(row.cells["group"], row.run.framework) for row in rows if row.run is not None}
    assert {("dgxc", "maxtext"), ("megatron", "nemo")} <= frameworks  # Megatron-Core on H100
    more = read_rows(DATA / "more_training_runs.csv")
    assert {row.refusal[-10:] for row in more if row.run is None} == {"got 'fp32'"}


# as their makers print them, in billions
PRINTED = {
    "llama-2-7b": 6.74,
    "llama-2-70b": 68.98,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.55,
    "llama-3-405b": 405.85,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.21,
    "qwen-2.5-0.5b": 0.494,
    "qwen-2.5-7b": 7.62,
    "qwen-3-8b": 8.19,
    "qwen-2.5-72b": 72.71,
    "mistral-7b": 7.24,
    "mistral-large": 122.6,
    "mistral-nemo": 12.25,
    "qwen-3-32b": 32.76,
    "gpt-3-175b": 174.6,
    "mpt-7b": 6.65,
    "mpt-30b": 29.95,
    "phi-3-mini": 3.82,
    "olmo-2-7b": 7.3,
    "yi-34b": 34.4,
}


@pytest.mark.parametrize("name", PRINTED)
def test_parameters_are_those_that_are_printed(name):
    assert NAMED[name].parameters / 1e9 == pytest.approx(PRINTED[name], rel=4e-3)


def test_labkits_sizes_are_the_ones_that_are_trained():
    assert {name: find_model(name).parameters for name in SIZES} == {
        name: n_parameters(SIZES[name]) for name in SIZES
    }


WRITTEN = {
    "meta-llama/Llama-3.1-8B": "llama-3-8b",
    "Llama 2 7B": "llama-2-7b",
    "llama3-70b": "llama-3-70b",
    "2.7b": "2.7B",
    "Qwen/Qwen2.5-7B-Instruct": "qwen-2.5-7b",
    "GPT-3 175B": "gpt-3-175b",
    "10b": "10B",
    "mini": "mini",
    "meta-llama/Llama-2-13b-chat-hf": "llama-2-13b",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama-3-8b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "openai-community/gpt2-xl": "gpt-2-xl",
}


@pytest.mark.parametrize(("written", "name"), WRITTEN.items())
def test_model_names_as_people_write_them(written, name):
    assert find_model(written) is NAMED[name]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lama-3-8b", "did you mean .*llama-3-8b"),
        ("7B", "did you mean llama-2-7b"),
        ("9z", "config.json"),
        ("mixtral-8x7b", "mixture of experts"),
    ],
)
def test_an_unknown_model_has_the_nearest_names(name, hint):
    with pytest.raises(ValueError, match=f"unknown model '{name}'.*{hint}"):
        find_model(name)


GPUS = {
    "H100": "H100-SXM-80GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM-80GB",
    "NVIDIA H100 PCIe": "H100-PCIe-80GB",
    "NVIDIA A100-SXM4-80GB": "A100-SXM-80GB",
    "A100 80GB PCIe": "A100-PCIe-80GB",
    "NVIDIA GB300": "GB300-279GB",
    "a100-sxm-40gb": "A100-SXM-40GB",
    "NVIDIA A100-SXM": "A100-SXM-80GB",
    "Tesla V100-SXM2-16GB": "V100-SXM-16GB",
    "rtx 4090": "RTX-4090-24GB",
    "NVIDIA GeForce RTX 4090": "RTX-4090-24GB",
    "NVIDIA GH200 480GB": "GH200-96GB",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX-PRO-6000-Blackwell-96GB",
    "H100 NVL": "H100-NVL-94GB",
    "AMD Instinct MI355X": "MI355X-288GB",
    "b300": "B300-SXM-270GB",
    "mi325x": "MI325X-256GB",
    "a100-40gb": "A100-SXM-40GB",
    "a100": "A100-SXM-80GB",
    "v100": "V100-SXM-32GB",
    "h100-94gb": "H100-NVL-94GB",
    "NVIDIA A100-PCIE-40GB": "A100-PCIe-40GB",
}


@pytest.mark.parametrize(("written", "name"), GPUS.items())
def test_gpus_as_people_and_nvidia_smi_write_them(written, name):
    assert find_hardware(written) is HARDWARE[name]


def test_every_gpu_is_found_by_its_name():
    assert all(find_hardware(name) is card for name, card in HARDWARE.items())


@pytest.mark.parametrize(
    "name",
    [
        "H900",
        "",
        "h",
        "h100-800gb",
        "-80gb",
        "A100-SXM-9999999GB",
        "tpu",
        "ada",
        "blackwell",
        "500w",
    ],
)
def test_a_gpu_that_is_not_declared_is_refused(name):
    with pytest.raises(ValueError, match="unknown GPU"):
        find_hardware(name)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("NVIDIA B300 SXM6 AC", "B300-SXM-270GB"),
        ("H100 MIG", "H100-SXM-80GB"),
        ("B200-SXM-192GB", "B200-SXM-180GB"),
        ("B200-192GB", "B200-SXM-180GB"),
        ("A800-40GB", "A800-SXM-80GB"),
        ("RTX 4080", "RTX-4090-24GB"),
        ("A800 80GB PCIe", "A800-SXM-80GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX-4090-24GB"),
    ],
)
def test_an_unknown_gpu_has_the_nearest_first(name, nearest):
    with pytest.raises(ValueError, match=f"the nearest declared are {nearest}"):
        find_hardware(name)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}


def _config(folder, content):
    return _file(
        folder, content if isinstance(content, bytes) else json.dumps(content), "config.json"
    )


@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "phi3", "internlm2", "olmo2", "granite", "stablelm"]
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_config_is_the_model_of_that_name(kind, encoding, tmp_path):
    content = json.dumps(LLAMA | {"model_type": kind}).encode(encoding)
    model = read_model(_config(tmp_path, content))
    assert model.parameters == NAMED["llama-3-8b"].parameters
    assert read_model(tmp_path) == model


def test_other_configs(tmp_path):
    model = read_model(_config(tmp_path, GPT2))
    assert (model.ffn, model.ffn_gated, model.tied, model.kv_heads) == (3072, False, True, 12)
    assert read_model(_config(tmp_path, LLAMA | {"head_dim": 64})).head_dim == 64
    mpt = {"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50432}
    assert read_model(_config(tmp_path, mpt)).parameters == NAMED["mpt-7b"].parameters
    folder = tmp_path / "Llama-3-8B"
    folder.mkdir()
    (folder / "config.json").symlink_to(_config(tmp_path, LLAMA))
    assert read_model(folder).name == "Llama-3-8B"


HOSTILE = {
    "another architecture": LLAMA | {"model_type": "mixtral"},
    "no architecture": {"hidden_size": 4096},
    "an empty architecture": LLAMA | {"model_type": None},
    "a list": [1, 2],
    "a text for a number": LLAMA | {"hidden_size": "4096"},
    "a flag for a number": LLAMA | {"num_hidden_layers": True},
    "not a number": b'{"model_type": "llama", "hidden_size": NaN}',
    "a number of a million digits": (
        b'{"model_type": "llama", "hidden_size": ' + b"9" * 10**6 + b"}"
    ),
    "zero": LLAMA | {"vocab_size": 0},
    "enormous": LLAMA | {"hidden_size": 10**12},
    "heads that do not divide": LLAMA | {"num_attention_heads": 33},
    "another type of flag": LLAMA | {"tie_word_embeddings": "no"},
    "missing": {name: value for name, value in LLAMA.items() if name != "vocab_size"},
    "nested": b"[" * 500_000,
    "empty": b"",
    "not utf-8": b"\xff\xfe\x00{",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_configs_are_refused_in_one_line(case, tmp_path):
    with pytest.raises(ValueError, match="expected") as refused:
        read_model(_config(tmp_path, HOSTILE[case]))
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 600


def test_a_refusal_has_the_name_that_the_file_has(tmp_path):
    with pytest.raises(ValueError, match="expected tie_word_embeddings"):
        read_model(_config(tmp_path, LLAMA | {"tie_word_embeddings": "no"}))


def test_a_config_of_a_mixture_of_experts_is_a_config(tmp_path):
    with pytest.raises(ValueError, match="mixture of experts") as refused:
        read_model(_config(tmp_path, LLAMA | {"num_experts_per_tok": 2}))
    assert "expected a config.json" not in str(refused.value)


def test_the_language_model_of_a_multimodal_config_is_read(tmp_path):
    dense = read_model(_config(tmp_path, LLAMA)).parameters
    for kind, key in (("gemma3_text", "text_config"), ("qwen3_vl_text", "text_config")):
        both = {"model_type": "x", key: LLAMA | {"model_type": kind, "tie_word_embeddings": False}}
        assert read_model(_config(tmp_path, both)).parameters == dense
    for key in ("llm_config", "language_config"):
        assert read_model(_config(tmp_path, {"model_type": "x", key: LLAMA})).parameters == dense
    assert read_model(_config(tmp_path, LLAMA | {"model_type": "qwen2_5_vl"})).layers  # a flat one
    inside = {name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"}
    outside = {"text_config": inside, "tie_word_embeddings": True}
    assert read_model(_config(tmp_path, outside)).tied
    with pytest.raises(ValueError, match="mixture of experts"):
        read_model(_config(tmp_path, {"text_config": LLAMA, "num_experts_per_tok": 2}))
    thinker = {"thinker_config": {"text_config": LLAMA}}
    assert read_model(_config(tmp_path, thinker)).parameters == dense
    with pytest.raises(ValueError, match=r"config.json: .*num_hidden_layers"):
        read_model(_config(tmp_path, {"text_config": {"model_type": "llama"}}))
    unknown = {"model_type": "x", "text_config": {"model_type": "mllama_text_model"}}
    with pytest.raises(ValueError, match="got 'mllama_text_model'"):
        read_model(_config(tmp_path, unknown))
    with pytest.raises(ValueError, match=r"expected a model_type.* got 'None'"):
        read_model(_config(tmp_path, {"model_type": "x", "text_config": {"num_layers": 2}}))
    mixture = {"model_type": "llama4_text", "num_experts_per_tok": 1}
    with pytest.raises(ValueError, match="mixture of experts"):
        read_model(_config(tmp_path, {"model_type": "llama4", "text_config": mixture}))


def test_a_config_of_any_name_is_named_by_its_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(LLAMA))
    assert read_model(path).name == "mine"
    for config in (LLAMA | {"num_experts_per_tok": 2}, LLAMA | {"model_type": "x"}):
        path.write_text(json.dumps(config))
        with pytest.raises(ValueError, match=re.escape(f"{str(path)[-80:]}: ")):
            read_model(path)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"<!DOCTYPE html><title>Sign in</title>", "Expecting value"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Expecting value"),
        (b"[1, 2]", "a list"),
    ],
)
def test_what_a_download_leaves_instead_of_a_config_is_refused(content, kind, tmp_path):
    with pytest.raises(ValueError, match=kind):
        read_model(_config(tmp_path, content))


def test_a_device_is_no_config(tmp_path):
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="there is no such file"):
        read_model(tmp_path)
