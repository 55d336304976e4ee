"""What torch compiles in a rank outlives it, in the user's directory or the one that the user
names."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

from labkit.nn.attention_implementations import no_compiler_reason
from labkit.parallel.launch import run_ranks
from labkit.parallel.ranks.worker import COMPILED_CODE


def _compile(_):
    torch.compile(torch.nn.functional.gelu)(torch.ones(8))
    return os.environ[COMPILED_CODE], tempfile.gettempdir()


@pytest.mark.slow
@pytest.mark.skipif(no_compiler_reason("cpu") is not None, reason=str(no_compiler_reason("cpu")))
@pytest.mark.parametrize("users", ["", "compiled"])
def test_compiled_code_outlives_its_rank_and_nothing_else_does(users, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv(COMPILED_CODE, str(tmp_path / users) if users else "")
    ((cache, temporary),) = run_ranks(_compile, None, world_size=1)
    assert not Path(temporary).exists()
    assert Path(cache).parent == tmp_path
    assert not users or Path(cache).name == users
    assert any(path.suffix in (".so", ".gch") for path in Path(cache).rglob("*"))
