"""Where things are: the project's folders, found from the package, never from the working directory."""

from pathlib import Path
from typing import Literal


def project_root() -> Path:
    """The checkout that holds this package; the working directory for a package installed elsewhere."""
    package = Path(__file__).resolve()
    for directory in package.parents:
        if (directory / "pyproject.toml").is_file() and (directory / "notebooks").is_dir():
            return directory
    return Path.cwd()


def runs_directory() -> Path:
    """This machine's runs, ignored by git."""
    return project_root() / "data" / "runs"


def recorded_directory() -> Path:
    """Runs worth keeping, committed."""
    return project_root() / "data" / "recorded"


def reference_directory() -> Path:
    """Published measurements."""
    return project_root() / "data" / "reference"


def datasets_directory() -> Path:
    """What was fetched to train on, ignored by git."""
    return project_root() / "data" / "datasets"


def figures_directory() -> Path:
    return project_root() / "figures"


def reports_directory() -> Path:
    return project_root() / "reports"


def notebook_path(lab: str) -> Path:
    """The notebook of a lab: `notebooks/<number>_<lab>.ipynb`. FileNotFoundError if there is none."""
    matches = sorted((project_root() / "notebooks").glob(f"[0-9][0-9]_{lab}.ipynb"))
    if not matches:
        raise FileNotFoundError(f"no notebook for the lab {lab!r} in {project_root() / 'notebooks'}")
    return matches[0]


def relative_to_project(path: Path) -> str:
    """A path as a reader of a page can use it: relative to the project where it lies inside."""
    try:
        return str(path.resolve().relative_to(project_root()))
    except ValueError:
        return str(path)


def kind_of_path(path: Path | str) -> Literal["file", "folder"] | None:
    """What lies at a path that a reader gave; None also for what can be no path, as a text of 10,000 characters."""
    try:
        return "file" if Path(path).is_file() else "folder" if Path(path).is_dir() else None
    except (OSError, ValueError):
        return None
