"""Puts each mistake into a copy of the tree and runs its tests there: `python -m tests.mutations.check [WORDS]`.

Prints a row per mistake and ends with 1 if any is not caught. WORDS pick the mistakes with them in file or name.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.mutations.mistake import Mistake
from tests.mutations.mistakes import MISTAKES

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600


def main(words: Sequence[str]) -> int:
    """Exit status: 0 if every mistake is caught."""
    chosen = [m for m in MISTAKES if all(word in f"{m.file} {m.name}" for word in words)]
    with tempfile.TemporaryDirectory(prefix="labkit-mutants-") as folder:
        tree = Path(folder)
        _copy(tree)
        passes = cache(lambda tests: _status(tree, tests) == 0)
        outcomes = [_report(tree, mistake, passes(mistake.tests)) for mistake in chosen]
    print(f"{outcomes.count('caught')} of {len(outcomes)} mistakes are caught by the tests of `make test`")
    return int(not outcomes or set(outcomes) != {"caught"})


def _copy(tree: Path) -> None:
    """What git has or would take, as it is in the working tree."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        source, target = ROOT / name, tree / name
        if name and (source.exists() or source.is_symlink()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target, follow_symlinks=False)


def _report(tree: Path, mistake: Mistake, passes_without: bool) -> str:
    outcome = _outcome(tree, mistake) if passes_without else "its tests fail without it"
    print(f"{outcome:<12} labkit/{mistake.file}: {mistake.name}", flush=True)
    return outcome


def _outcome(tree: Path, mistake: Mistake) -> str:
    path = tree / "labkit" / mistake.file
    right = path.read_text()
    assert right.count(mistake.old) == 1, mistake
    path.write_text(right.replace(mistake.old, mistake.new))
    try:
        status = _status(tree, mistake.tests)
    finally:
        path.write_text(right)
    # 1: a test failed. What hangs is seen, too. Anything else is no test's verdict.
    return {0: "NOT CAUGHT", 1: "caught", None: "caught"}.get(status, f"pytest ended with {status}")


def _status(tree: Path, tests: Sequence[str]) -> int | None:
    """How pytest ended; None if it did not in time."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    try:
        return subprocess.run(command, cwd=tree, capture_output=True, timeout=TIMEOUT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
