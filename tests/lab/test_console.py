"""A lab in a console or a script, which has neither cells nor HTML."""

from labkit.lab.notebook import open_lab
from labkit.lab.runs import measure as measuring
from tests.lab.fake_lab import FAKE


def test_a_lab_in_a_script_is_told_in_text(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measuring, "runs_directory", lambda: tmp_path)
    lab = open_lab(FAKE, {"profile": "smoke", "world_size": 1, "actions": ["fine", "skip"], "mine": 1})
    lab.machine_card()
    frame = lab.measure()
    lab.table(frame[["size", "rank"]], "Rows.")
    lab.answer("how_many")
    lab.close()
    said = capsys.readouterr().out
    assert "<" not in said
    for text in ("Machine  ", "2 points planned, 1 measured, 1 skipped", "Rows.\nsize  rank\n", "2 rows.", "Run  "):
        assert text in said
