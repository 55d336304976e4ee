"""Where things are: what comes with labkit, found from the package, and the folder that a user's results go to."""

import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal

PACKAGE = Path(__file__).resolve().parents[1]


def checkout() -> Path | None:
    """The checkout that labkit is used from; None for one that is installed elsewhere."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "notebooks").is_dir() else None


def project_root() -> Path:
    """Where runs, figures, reports and data sets go: $LABKIT_HOME, else the checkout, else the working directory."""
    if home := os.environ.get("LABKIT_HOME"):
        return Path(home).expanduser().resolve()
    return checkout() or Path.cwd()


def shipped() -> Path:
    """What comes with labkit: notebooks and data, in the checkout, or with the package where that is installed."""
    return checkout() or PACKAGE / "shipped"


def runs_directory() -> Path:
    """This machine's runs, ignored by git."""
    return project_root() / "data" / "runs"


def recorded_directory() -> Path:
    """Runs worth keeping, committed."""
    return shipped() / "data" / "recorded"


def reference_directory() -> Path:
    """Published measurements."""
    return shipped() / "data" / "reference"


def datasets_directory() -> Path:
    """What was fetched to train on, ignored by git."""
    return project_root() / "data" / "datasets"


def figures_directory() -> Path:
    return project_root() / "figures"


def reports_directory() -> Path:
    return project_root() / "reports"


def notebooks_directory() -> Path:
    return shipped() / "notebooks"


def check_writable(*folders: Path) -> None:
    """ParameterError, with the way out, for a folder in which no file can be made, or which itself cannot be made."""
    from labkit.lab.config import ParameterError  # ranks look for folders, too, and start without pydantic

    for folder in folders:
        try:
            there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
            TemporaryFile(dir=there).close()
        except OSError as error:
            way_out = "; `export LABKIT_HOME=FOLDER` sends runs, figures and reports to a folder of yours"
            is_ours = folder.resolve().is_relative_to(project_root())
            message = f"{folder} cannot be written ({error.strerror})"
            raise ParameterError(message + (way_out if is_ours else "")) from None


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: under a temporary name next to it, then renamed.

    OSError, with the name of the file, if that fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def notebook_path(lab: str) -> Path:
    """The notebook of a lab: `notebooks/<number>_<lab>.ipynb`. FileNotFoundError if there is none."""
    matches = sorted(notebooks_directory().glob(f"[0-9][0-9]_{lab}.ipynb"))
    if not matches:
        raise FileNotFoundError(f"no notebook for the lab {lab!r} in {notebooks_directory()}")
    return matches[0]


def committed_notebook(lab: str) -> tuple[str, bool]:
    """The notebook of a lab as text, for a report, and whether its file is an edited one, which a reader explores with.

    Of an edited notebook git's last commit is taken; without git the file.
    """
    path = notebook_path(lab)
    text = path.read_text(encoding="utf-8")
    command = ["git", "-c", "safe.directory=*", "-C", str(path.parent), "show", f"HEAD:./{path.name}"]
    try:
        committed = subprocess.run(command, capture_output=True, check=True, timeout=10).stdout.decode()
    except (OSError, subprocess.SubprocessError):
        return text, False
    is_edited = _code_cells(text) != _code_cells(committed)
    return committed if is_edited else text, is_edited


def _code_cells(text: str) -> list[str] | None:
    """The source of each code cell; None for what is no notebook, as after a failed merge."""
    try:
        cells = json.loads(text)["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError):
        return None


def relative_to_project(path: Path) -> str:
    """A path as a reader of a page can use it: relative to the project, or to what comes with labkit, where inside."""
    resolved = path.resolve()
    root = next((root for root in (project_root(), shipped()) if resolved.is_relative_to(root)), None)
    return str(resolved.relative_to(root) if root else path)


def path_from_here(path: Path) -> str:
    """A path as a reader of the terminal can use it: relative to the working directory where inside."""
    resolved, here = path.resolve(), Path.cwd()
    return str(resolved.relative_to(here) if resolved.is_relative_to(here) else resolved)


def kind_of_path(path: Path | str) -> Literal["file", "folder"] | None:
    """What lies at a path that a reader gave; None also for what can be no path, as a text of 10,000 characters."""
    try:
        return "file" if Path(path).is_file() else "folder" if Path(path).is_dir() else None
    except (OSError, ValueError):
        return None
