"""Change modules at random places and name the changes that no test notices (`make mutants`).

    python tests/mutants.py     # the modules below, 60 changes each
    python tests/mutants.py --module labkit/lab/answers.py --changes 200

cosmic-ray makes the changes (another operator, number, comparison or condition, one at a time) in a
copy of the last commit, and runs the module's tests on each. A change that survives is either a
missing test or makes no difference.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = {
    "labkit/bench/statistics.py": "tests/bench/test_statistics.py tests/bench/test_sessions.py",
    "labkit/bench/intervals.py": "tests/bench/test_statistics.py tests/bench/test_sessions.py",
    "labkit/lab/answers.py": "tests/lab/test_answers.py",
    "labkit/parallel/collectives.py": "tests/parallel/test_collectives.py",
    "labkit/parallel/sync_batchnorm.py": "tests/parallel/test_sync_batchnorm.py",
}
"""The tests, as pytest takes them, that are to notice a change of a module."""
CONFIG = """
[cosmic-ray]
module-path = "{module}"
timeout = 300
excluded-modules = []
test-command = "{python} -m pytest -x -q -p no:cacheprovider {tests}"
[cosmic-ray.distributor]
name = "local"
"""


def main() -> None:
    """Test each module, and print what survives; exit 1 if a module's tests fail without a
    change."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--module", choices=TESTS, help="default: all of them")
    parser.add_argument("--changes", type=int, default=60, help="per module, drawn at random")
    options = parser.parse_args()
    for module in [options.module] if options.module else TESTS:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "labkit")
            _run(["git", "clone", "--quiet", str(ROOT), str(copy)], ROOT)
            config = CONFIG.format(module=module, tests=TESTS[module], python=sys.executable)
            Path(copy, "mutants.toml").write_text(config)
            _test_module(copy, options.changes)


def _test_module(copy: Path, changes: int) -> None:
    cosmic_ray = str(Path(sys.executable).with_name("cosmic-ray"))
    _run([cosmic_ray, "baseline", "mutants.toml"], copy)
    _run([cosmic_ray, "init", "mutants.toml", "session.sqlite"], copy)
    _skip_all_but(changes, copy / "session.sqlite")
    _run([cosmic_ray, "exec", "mutants.toml", "session.sqlite"], copy)
    report = Path(sys.executable).with_name("cr-report")
    _run([str(report), "session.sqlite", "--show-diff", "--surviving-only"], copy)


def _skip_all_but(changes: int, session: Path) -> None:
    """Mark all work of a session as skipped but for `changes` items, the same ones every time."""
    from cosmic_ray.work_db import use_db
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    with use_db(str(session)) as database:
        items = sorted(database.pending_work_items, key=lambda item: str(item.mutations))
        for item in random.Random(0).sample(items, max(0, len(items) - changes)):
            database.set_result(item.job_id, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))


def _run(command: Sequence[str], folder: Path) -> None:
    # Else the fork server of the tests, and so their ranks, would import the labkit that is
    # installed.
    subprocess.run(command, cwd=folder, check=True, env=os.environ | {"PYTHONPATH": str(folder)})


if __name__ == "__main__":
    main()
