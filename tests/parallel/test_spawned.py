"""Wrappers and collectives in processes that labkit did not start: the README's example, as it stands."""

import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "pieces.md"


def test_the_readmes_spawned_processes_average(tmp_path):
    blocks = PAGE.read_text().split("```python\n")[1:]
    (example,) = (block.split("```")[0] for block in blocks if "multiprocessing.spawn(" in block)
    (tmp_path / "spawned.py").write_text(example)
    environment = {"PYTHONPATH": str(PAGE.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "spawned.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert sorted(done.stdout.splitlines()) == [f"{rank} [[0.5, 0.5, 0.5, 0.5]] [0.5]" for rank in (0, 1)], done.stderr
