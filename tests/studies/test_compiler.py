"""What torch tries of the C++ compiler is kept for later ranks; what they compile then is not, unless they ask."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

from labkit.nn.attention_implementations import no_compiler_reason
from labkit.parallel.launch import run_ranks
from labkit.parallel.ranks.worker import COMPILED_CODE
from labkit.studies.shared.compiler import keep_what_is_compiled, make_compiler_ready


def _compile(ready):
    make_compiler_ready("cpu" if ready else "cuda")
    torch.compile(torch.nn.functional.gelu)(torch.ones(8))
    return tempfile.gettempdir()


@pytest.mark.slow
@pytest.mark.skipif(no_compiler_reason("cpu") is not None, reason=str(no_compiler_reason("cpu")))
def test_a_ranks_look_at_the_compiler_outlives_it_and_what_it_compiles_does_not(tmp_path):
    def kept():
        return {path for path in tmp_path.rglob("*") if path.is_file() and path.suffix in (".so", ".gch")}

    own = run_ranks(_compile, True, world_size=1, environment={"TMPDIR": str(tmp_path), COMPILED_CODE: ""})
    first = kept()
    assert first
    assert not Path(*own).exists()
    run_ranks(_compile, True, world_size=1, environment={"TMPDIR": str(tmp_path), COMPILED_CODE: ""})
    assert kept() == first


def _where_it_is_kept(_):
    before = os.environ.get(COMPILED_CODE)
    keep_what_is_compiled()
    return before, os.environ[COMPILED_CODE], tempfile.gettempdir()


@pytest.mark.parametrize("users", [None, "compiled"])
def test_what_a_rank_is_to_keep_goes_to_the_users_directory_and_nothing_else_does(users, tmp_path):
    # where this process has compiled something, torch has set it
    environment = {"TMPDIR": str(tmp_path), COMPILED_CODE: str(tmp_path / users) if users else ""}
    ((before, cache, temporary),) = run_ranks(_where_it_is_kept, None, world_size=1, environment=environment)
    assert before is None
    assert Path(cache).parent == tmp_path
    assert users is None or Path(cache).name == users
    assert not Path(temporary).exists()
