"""Paths: files that come with labkit, and the folder of a user's results."""

import errno
import fcntl
import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, TypeGuard

PACKAGE = Path(__file__).resolve().parents[1]


def checkout() -> Path | None:
    """Return the root of the checkout; None for an installed labkit."""
    root = PACKAGE.parent
    if (root / "pyproject.toml").is_file() and (root / "notebooks").is_dir():
        return root
    return None


def project_root() -> Path:
    """Return the folder of results: $LABKIT_HOME, else the checkout, else the working directory.

    ParameterError for a home of an unknown user (~name).
    """
    home = os.environ.get("LABKIT_HOME")
    if not home:
        return checkout() or Path.cwd()
    try:
        return Path(home).expanduser().resolve()
    except RuntimeError:
        # Ranks look for folders, too, and start without pydantic.
        from labkit.lab.config import ParameterError

        raise ParameterError(f"LABKIT_HOME={home}: there is no such user or home folder") from None


def shipped() -> Path:
    """Return the folder of the notebooks and data that come with labkit."""
    return checkout() or PACKAGE / "shipped"


def runs_directory() -> Path:
    """Return this machine's runs, ignored by git."""
    return project_root() / "data" / "runs"


def recorded_directory() -> Path:
    """Return runs worth keeping, committed."""
    return shipped() / "data" / "recorded"


def reference_directory() -> Path:
    """Return published measurements."""
    return shipped() / "data" / "reference"


def datasets_directory() -> Path:
    """Downloaded data sets, ignored by git."""
    return project_root() / "data" / "datasets"


def figures_directory() -> Path:
    return project_root() / "figures"


def notebooks_directory() -> Path:
    return shipped() / "notebooks"


def check_writable(*folders: Path) -> None:
    """ParameterError, with the way out, for a folder that cannot be made or takes no files."""
    from labkit.lab.config import ParameterError

    for folder in folders:
        parents = (folder, *folder.absolute().parents)
        # By writing: permissions do not tell of read-only file systems, quotas and root.
        try:
            TemporaryFile(dir=next(path for path in parents if path.exists())).close()
        except OSError as error:
            reason = f"{folder} cannot be written ({error.strerror})"
            if folder.resolve().is_relative_to(project_root()):
                reason += "; `export LABKIT_HOME=FOLDER` sends runs, figures and reports elsewhere"
            raise ParameterError(reason) from None


def lock_file(descriptor: int, path: Path) -> None:
    """Lock an open file for this process.

    BlockingIOError if another process has locked it; ParameterError, with the way out, on a file
    system without locks, as some of NFS and of containers.
    """
    from labkit.lab.config import ParameterError

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        raise ParameterError(
            f"{path} cannot be locked ({error.strerror}); `export LABKIT_HOME=FOLDER` sends runs,"
            " figures and reports to another file system"
        ) from None


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all. OSError with the file's name if that fails."""
    if isinstance(content, str):
        # Names of a student's files, or texts in JSON, may be no Unicode.
        content = content.encode(errors="replace")
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a file cannot be renamed into another file system.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        # A read-only folder would have its own error here, about a file that nobody knows.
        with suppress(OSError):
            part.unlink(missing_ok=True)


def status_of_file_error(error: OSError) -> int | None:
    """Return the exit status of a command that ends with this error; None if it is no file's."""
    # A path that can name no file is the caller's mistake.
    if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
        return 2
    # A disk that is full or broken, or a folder that may not be written, is not.
    not_writable = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
    if error.errno in (*not_writable, errno.EIO, errno.ESTALE):
        return 1
    return None


def is_full_disk(error: Exception) -> TypeGuard[OSError]:
    """Return whether an error says that the disk, or this user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def notebook_path(lab: str) -> Path:
    """Return the path of a lab's notebook. FileNotFoundError if there is none."""
    # The number, which is the order of reading, is no part of a lab's name.
    matches = sorted(notebooks_directory().glob(f"[0-9][0-9]_{lab}.ipynb"))
    if not matches:
        raise FileNotFoundError(f"no notebook for the lab {lab!r} in {notebooks_directory()}")
    return matches[0]


def committed_notebook(lab: str) -> tuple[str, bool]:
    """Return the text of a lab's notebook for a report, and whether it is not the file's.

    If code of the file was edited, it is that of git's last commit. Without git it is the file's.
    """
    path = notebook_path(lab)
    text = path.read_text(encoding="utf-8")
    # A container's folder may belong to another user, which git refuses by default.
    git = ["git", "-c", "safe.directory=*", "-C", str(path.parent)]
    command = [*git, "show", f"HEAD:./{path.name}"]
    try:
        shown = subprocess.run(command, capture_output=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return text, False
    committed = shown.stdout.decode()
    # Text may be edited; edited code would change what a report of this name measures.
    if _code_cells(text) == _code_cells(committed):
        return text, False
    return committed, True


def _code_cells(text: str) -> list[str] | None:
    """Return the source of each code cell; None for no notebook, as after a failed merge."""
    try:
        cells = json.loads(text)["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError):
        return None


def relative_to_project(path: Path) -> str:
    """Return the path for a page, relative to the project or to the files that come with labkit."""
    resolved = path.resolve()
    for root in (project_root(), shipped()):
        if resolved.is_relative_to(root):
            return str(resolved.relative_to(root))
    return str(path)


def from_project(text: str) -> Path:
    """Return the path that `relative_to_project` wrote, perhaps on another machine."""
    candidates = [root / text for root in (project_root(), shipped())]
    return next((path for path in candidates if path.is_file()), candidates[0])


def path_from_here(path: Path) -> str:
    """Return the path for a terminal: relative to the working directory if inside."""
    resolved = path.resolve()
    if resolved.is_relative_to(Path.cwd()):
        resolved = resolved.relative_to(Path.cwd())
    return str(resolved)


def kind_of_path(path: Path | str) -> Literal["file", "folder"] | None:
    """Return the kind of a path from a user; None if nothing is there."""
    try:
        if Path(path).is_file():
            return "file"
        return "folder" if Path(path).is_dir() else None
    # The text may be no path at all, as with 10,000 characters or a zero byte.
    except (OSError, ValueError):
        return None


def forget_version(model: dict[str, Any], **_: Any) -> None:
    """Remove from a notebook which Python ran it: a hook that JupyterLab calls before saving."""
    # Cleared and saved, a notebook is then the committed one byte for byte, whoever ran it.
    if model["type"] == "notebook":
        model["content"]["metadata"].get("language_info", {}).pop("version", None)
