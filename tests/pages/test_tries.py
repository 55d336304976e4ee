"""What a notebook offers its reader to try works as written, and ends in questions whose answers
are folded."""

import re
from functools import cache

import pandas as pd
import pytest

from labkit.lab.runs.store import Run
from labkit.studies import LABS, load_lab
from tests import calibrated
from tests.pages.cells import carry_out, cells_of, recorded, tries_in

OWN = re.compile(r"lab\.measure\(\{")  # a reader's own alternative
# Settings that make a lab's measurement of it short.
SMALL = {
    "all_reduce": {"transports": [], "scheduling_bytes": []},
    "attention": {
        "implementations": ["explicit", "tiled"],
        "sequences": [64],
        "compiled_sequences": [],
    },
    "data_parallel": {"implementations": ["torch"]},
    "sharding": {"implementations": ["ddp", "zero1"], "optimizers": ["SGD"]},
    "sync_batchnorm": {"batches": [32], "features": [128]},
}


@cache
def _tries(lab):
    return [
        source for kind, text in cells_of(lab) if kind == "markdown" for source in tries_in(text)
    ]


@pytest.mark.parametrize("lab", LABS)
def test_every_try_works_as_written_below_the_cells_above_it(lab):
    run = recorded(lab)
    if run.header.calibration is None:  # predictions need one
        run = Run(
            run.path,
            run.header.model_copy(update={"calibration": calibrated.made_up()}),
            run.rows,
            run.ends,
        )
    carry_out(load_lab(lab), run, has_tries=True)


@pytest.mark.parametrize("lab", LABS)
def test_a_lab_has_tries_and_its_source_and_ends_in_three_questions_with_folded_answers(lab):
    cells = cells_of(lab)
    assert 1 <= len(_tries(lab)) <= 5
    assert (lab in SMALL) == any(OWN.search(source) for source in _tries(lab))
    assert any("lab.source(" in source for kind, source in cells if kind == "code")
    (text,) = [source for kind, source in cells[-2:] if kind == "markdown"]
    folded = re.findall(
        r"<details><summary>[^<>$`]+\?</summary>\n\n(.+?)\n\n</details>", text, re.DOTALL
    )
    assert len(folded) == 3
    assert text.count("<details>") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lab", "source"), [(lab, one) for lab in SMALL for one in _tries(lab) if OWN.search(one)]
)
def test_a_readers_own_as_the_notebook_has_it_is_right_and_measured(
    lab, source, monkeypatch, tmp_path
):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    above = [text for kind, text in cells_of(lab) if kind == "code"][:3]
    namespace = {"__name__": "__main__"}
    exec(above[0], namespace)
    namespace |= {"profile": "smoke", "config": SMALL[lab]}
    for cell in above[1:]:
        exec(cell, namespace)
    exec(source, namespace)
    frame = namespace["frame"]
    study = load_lab(lab)
    mine = frame[frame[study.plugin_parameter.removesuffix("s")] == "mine"]
    assert set(mine.get("status", pd.Series(dtype=str)).dropna()) <= {"ok"}
    assert mine["seconds"].notna().any()
    assert set(namespace["lab"].run.coverage()["status"]) <= {"ok", "skipped"}
