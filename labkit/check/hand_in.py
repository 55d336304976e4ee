"""What a student hands in: one zip with the name, and per lab the run, the notebook and the page."""

import io
import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from labkit.check.bundle import scrub
from labkit.lab.config import ParameterError
from labkit.lab.project import notebook_path, reports_directory, runs_directory, write_file
from labkit.lab.runs.store import Run, RunFileError
from labkit.machine import describe_machine

CARD = "hand-in.json"
LARGEST = 50 * 2**20
NAME = re.compile(r"[\w][\w .-]{0,63}")


@dataclass(frozen=True)
class HandIn:
    """A zip as it was read: who, and the runs by lab; `problems` are runs that cannot be read, by lab."""

    name: str
    runs: dict[str, Run]
    problems: dict[str, str]


def write_hand_in(name: str, labs: Sequence[str], folder: Path, notebooks: Sequence[Path] = ()) -> Path:
    """Write `hand-in-<name>.zip` with the newest run of each lab that has one; return its path.

    `notebooks` are the student's own, instead of the shipped ones of their labs. ParameterError for a name that is
    none, a notebook that is not there, and if no lab was measured.
    """
    if not NAME.fullmatch(name):
        raise ParameterError(f"expected a name of letters, digits, blanks, - and _, at most 64, got {name!r:.80}")
    for notebook in notebooks:
        if not notebook.is_file():
            raise ParameterError(f"{notebook}: no such notebook")
    newest = {lab: max((runs_directory() / lab).glob("*.jsonl"), default=None) for lab in labs}
    runs = {lab: path for lab, path in newest.items() if path is not None}
    if not runs:
        raise ParameterError(f"nothing to hand in: no run of {', '.join(labs)} in {runs_directory()}")
    card = {"name": name, "labs": list(runs), "written": datetime.now(UTC).isoformat(timespec="seconds")}
    card["labkit"] = str(describe_machine().source)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(CARD, json.dumps(card))
        for notebook in notebooks:
            archive.writestr(f"notebooks/{notebook.name}", notebook.read_text())
        for lab, path in runs.items():
            archive.writestr(f"{lab}/run.jsonl", scrub(path.read_text()))
            if not notebooks:
                archive.writestr(f"{lab}/{lab}.ipynb", notebook_path(lab).read_text())
            if (page := reports_directory() / f"{lab}.html").is_file():
                archive.writestr(f"{lab}/{lab}.html", page.read_text())
    path = folder / f"hand-in-{name.replace(' ', '-')}.zip"
    write_file(path, file.getvalue())
    return path


def read_hand_ins(folder: Path) -> Iterator[HandIn]:
    """Yield each hand-in of a folder, by name. One that is damaged has a problem instead of runs."""
    for path in sorted(folder.glob("*.zip")):
        try:
            with zipfile.ZipFile(path) as archive:
                yield _read(archive, path)
        except (zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
            yield HandIn(path.stem.removeprefix("hand-in-"), {}, {"all": f"cannot be read: {error}"})


def _read(archive: zipfile.ZipFile, path: Path) -> HandIn:
    card = json.loads(archive.read(CARD))
    runs, problems = dict[str, Run](), dict[str, str]()
    with TemporaryDirectory(prefix="labkit-hand-in-") as folder:
        for lab in card["labs"]:
            info = archive.getinfo(f"{lab}/run.jsonl")
            if info.file_size > LARGEST:
                problems[lab] = f"a run of {info.file_size / 2**20:.0f} MiB, at most {LARGEST / 2**20:.0f} are read"
                continue
            copied = Path(folder) / f"{path.stem}.jsonl"
            copied.write_bytes(archive.read(info))
            try:
                runs[lab] = Run.load(copied)
            except RunFileError as error:
                problems[lab] = str(error).replace(str(copied), "run.jsonl")
    return HandIn(str(card["name"]), runs, problems)


def holds_hand_ins(folder: Path) -> bool:
    """Whether a folder has zips that students handed in."""
    return folder.is_dir() and any(folder.glob("hand-in-*.zip"))
