"""Describes which labkit measures: version, commit, and a digest of files that matter."""

import hashlib
import subprocess
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from labkit import __version__

PACKAGE = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".cpp", ".csv")
# Folder of an installed package that a checkout has elsewhere: notebooks, published tables,
# recorded runs.
SHIPPED = "shipped"


class Source(BaseModel, frozen=True):
    """Which labkit measured; a saved notebook or a build folder changes nothing."""

    commit: str | None = None
    """None for a labkit that was installed from elsewhere than a git checkout."""
    dirty: bool = False
    """Whether files differed from the commit."""
    version: str | None = None
    digest: str | None = None
    """SHA-256 of the files, equal wherever the source is. Older runs lack it, and the version."""

    def __str__(self) -> str:
        if self.commit is None:
            return f"labkit {self.version}, modules {(self.digest or 'unknown')[:12]}"
        return f"commit {self.commit[:12]}" + (" with local changes" if self.dirty else "")


def describe_source(package: Path = PACKAGE) -> Source:
    """Return version, digest and commit of the package in this folder."""
    files = {
        path.relative_to(package): path for path in package.rglob("*") if path.suffix in SUFFIXES
    }
    # What a checkout has elsewhere counts there and here not, so that both have one digest.
    names = sorted(name for name in files if name.parts[0] != SHIPPED)
    digests = [f"{name} {hashlib.sha256(files[name].read_bytes()).hexdigest()}" for name in names]
    digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    commit = None
    dirty = False
    with suppress(OSError, subprocess.SubprocessError):
        # Git must track the package: an environment inside somebody's checkout is no part of it.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(package, "rev-parse", "HEAD")
        patterns = [f"*{suffix}" for suffix in SUFFIXES]
        dirty = bool(
            _git(package, "status", "--porcelain", "--untracked-files=all", "--", *patterns)
        )
    return Source(commit=commit, dirty=dirty, version=__version__, digest=digest)


def _git(directory: Path, *arguments: str) -> str:
    # Git refuses a checkout of another owner, whose settings could name programs to run; here all
    # modules run anyway. It must write nothing, not even its index.
    options = ["-c", "safe.directory=*", "--no-optional-locks"]
    command = ["git", "-C", str(directory), *options, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
