"""Which labkit measures: version, commit, and a digest of its modules, which are all that a measurement executes."""

import hashlib
import subprocess
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from labkit import __version__

PACKAGE = Path(__file__).resolve().parents[1]


class Source(BaseModel):
    """Which labkit measured. Only its modules count: a saved notebook or a build folder changes no measurement."""

    model_config = ConfigDict(frozen=True)

    commit: str | None = None
    """None for a labkit that was installed from elsewhere than a git checkout."""
    dirty: bool = False
    """Whether modules differed from the commit."""
    version: str | None = None
    digest: str | None = None
    """SHA-256 of the modules: the same source has the same one, wherever it is. Older runs lack it, and the version."""

    def __str__(self) -> str:
        if self.commit is None:
            return f"labkit {self.version}, modules {(self.digest or 'unknown')[:12]}"
        return f"commit {self.commit[:12]}" + (" with local changes" if self.dirty else "")


def describe_source(package: Path = PACKAGE) -> Source:
    """Version, digest and commit of the package in this folder."""
    modules = sorted(package.rglob("*.py"))
    digests = [f"{path.relative_to(package)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in modules]
    digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    commit, dirty = None, False
    try:
        # Git must track the package: an environment inside somebody's checkout is no part of it.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(package, "rev-parse", "HEAD")
        dirty = bool(_git(package, "status", "--porcelain", "--untracked-files=all", "--", "*.py"))
    except (OSError, subprocess.SubprocessError):
        pass
    return Source(commit=commit, dirty=dirty, version=__version__, digest=digest)


def _git(directory: Path, *arguments: str) -> str:
    # Git refuses to read a checkout of another owner, whose settings could name programs to be run. Of this one all
    # modules are run. Nothing is written, not even git's own index.
    options = ["-c", "safe.directory=*", "--no-optional-locks"]
    command = ["git", "-C", str(directory), *options, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
