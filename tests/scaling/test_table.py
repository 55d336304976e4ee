"""Tables in and out: the published one as a whole, and rows that are wrong."""

import csv
import io
import time

import pytest

from labkit.scaling.table import PREDICTED, predicted_rows, read_rows, write_rows
from tests.commands import labkit
from tests.scaling.conftest import DATA

GOOD = {
    **{"group": "mosaic", "gpu": "H100-SXM-80GB", "gpus": "8", "layers": "32", "hidden": "4096", "heads": "32"},
    **{"vocab": "50368", "seq_len": "2048", "tp": "1", "pp": "1", "dp": "8", "shard": "zero3", "micro_batch": "4"},
    **{"global_batch": "64", "ffn": "", "note": ""},
}
WRONG = [
    ({"gpu": "Z9"}, "unknown GPU 'Z9'"),
    ({"gpus": "16"}, "is 8, and gpus is 16"),
    ({"heads": "33"}, "multiple of heads"),
    ({"heads": ""}, "heads is empty"),
    ({"layers": "0"}, "layers above 0"),
    ({"layers": "nan"}, "layers above 0"),
    ({"hidden": "1e30"}, "hidden above 0 and at most"),
    ({"hidden": "4096.5"}, "whole number"),
    ({"seq_len": "long"}, "seq_len to be a number"),
    ({"global_batch": "63"}, "divided over dp = 8"),
    ({"micro_batch": "3"}, "no multiple of 3"),
    ({"shard": "zero9"}, "shard among"),
    ({"recompute": "perhaps"}, "recompute among"),
    ({"tied": "maybe"}, "tied to be 0 or 1"),
    ({"layers": "900000000", "pp": "100000000", "gpus": "800000000"}, "pp of at most 512"),
    ({"group": "nanotron", "pp": "1000000", "gpus": "8000000"}, "pp of at most 512"),
]


def _file(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for row in rows for name in row}), restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(("change", "reason"), WRONG, ids=lambda value: str(value))
def test_a_wrong_row_is_refused_by_its_line_and_the_others_are_predicted(tmp_path, change, reason):
    rows = read_rows(_file(tmp_path / "rows.csv", [GOOD, GOOD | change, GOOD]))
    assert [row.run is None for row in rows] == [False, True, False]
    assert rows[1].line == 3
    assert reason in rows[1].refusal
    first, refused, last = predicted_rows(rows)
    assert refused["step_s"] == ""
    assert reason in refused["note"]
    assert first == last
    assert float(first["step_low"]) < float(first["step_s"]) < float(first["step_high"])


def test_every_published_row_is_predicted_in_seconds(published_rows):
    begun = time.process_time()
    predicted = predicted_rows(published_rows)
    assert time.process_time() - begun < 10
    assert len(predicted) == 3415
    assert all(float(row["step_s"]) > 0 and set(PREDICTED) <= set(row) for row in predicted)
    assert predicted[0]["measured_step_s"] == "3.26456"


def test_a_predicted_table_is_predicted_again_as_before(tmp_path, published_rows):
    chosen = [published_rows[row] for row in (0, 700, 1950, 3300, 3400)]
    once = predicted_rows(chosen)
    again = predicted_rows(read_rows(_file(tmp_path / "again.csv", once)))
    assert again == once


def test_what_is_not_a_table_is_refused_in_a_line(tmp_path):
    (tmp_path / "words.csv").write_text("not,a,table\n1,2,3\n")
    with pytest.raises(ValueError, match="lacks the columns gpu, gpus"):
        read_rows(tmp_path / "words.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00gpu")
    with pytest.raises(ValueError, match="UTF-8"):
        read_rows(tmp_path / "bytes.csv")
    (tmp_path / "empty.csv").write_text(",".join(GOOD) + "\n")
    with pytest.raises(ValueError, match="no rows"):
        read_rows(tmp_path / "empty.csv")


def test_rows_survive_being_written(tmp_path):
    out = io.StringIO()
    predicted = predicted_rows(read_rows(_file(tmp_path / "rows.csv", [GOOD])))
    write_rows(predicted, out)
    assert list(csv.DictReader(io.StringIO(out.getvalue()))) == predicted


def test_the_command_writes_predictions_and_names_refused_rows(tmp_path):
    table = _file(tmp_path / "rows.csv", [GOOD, GOOD | {"gpu": "Z9"}])
    done = labkit("predict", str(table), "--output", str(tmp_path / "out.csv"))
    assert done.returncode == 1
    assert "line 3: unknown GPU 'Z9'" in done.stderr
    written = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [bool(row["step_s"]) for row in written] == [True, False]
    missing = labkit("predict", str(tmp_path / "none.csv"))
    assert missing.returncode == 2
    assert "Traceback" not in missing.stderr


def test_the_frameworks_of_the_published_rows(published_rows):
    found = {(row.cells["group"], row.run.framework) for row in published_rows}
    assert ("dgxc", "maxtext") in found
    assert ("megatron", "nemo") in found  # Megatron-Core on H100
    assert "generic" not in {framework for _, framework in found}
    assert (DATA / "README.md").exists()
