"""Puts each mistake into a copy of the tree and runs its tests there: `python -m tests.mutations.check [WORDS]`.

Prints a row per mistake, with the test that saw it, and ends with 1 if any is not caught. WORDS pick the mistakes with
them in file or name.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, partial
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
        passes = cache(partial(_passes, tree))
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


def _passes(tree: Path, tests: Sequence[str]) -> bool:
    """Whether they do without a mistake; if not, what they say is printed."""
    ended = _ended(tree, tests)
    if ended is None or ended.returncode:
        print(ended.stdout[-2000:] if ended else f"not over after {TIMEOUT_S} s", flush=True)
    return ended is not None and ended.returncode == 0


def _report(tree: Path, mistake: Mistake, passes_without: bool) -> str:
    outcome, by = _outcome(tree, mistake) if passes_without else ("its tests fail without it", "")
    print(f"{outcome:<12} labkit/{mistake.file}: {mistake.name}{by and f', by {by}'}", flush=True)
    return outcome


def _outcome(tree: Path, mistake: Mistake) -> tuple[str, str]:
    """What became of it, and the first test that failed."""
    path = tree / "labkit" / mistake.file
    right = path.read_text()
    assert right.count(mistake.old) == 1, mistake
    path.write_text(right.replace(mistake.old, mistake.new))
    try:
        ended = _ended(tree, mistake.tests)
    finally:
        path.write_text(right)
    # 1: a test failed. What hangs is seen, too. Anything else is no test's verdict.
    status = ended.returncode if ended else 1
    outcome = {0: "NOT CAUGHT", 1: "caught"}.get(status, f"pytest ended with {status}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE) if ended else None
    return outcome, failed[1] if failed else "" if ended else f"no end within {TIMEOUT_S} s"


def _ended(tree: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """Pytest, and what it said; None if it did not end in time."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    # What the fork server loads for the ranks it does not look for in the working directory.
    variables = os.environ | {"PYTHONPATH": str(tree)}
    try:
        return subprocess.run(
            command, cwd=tree, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
