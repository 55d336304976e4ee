"""What a student hands in: one zip with the name, the notebooks, and per lab the run and the page."""

import io
import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat

from labkit.check.bundle import scrub, scrub_json, scrub_names
from labkit.lab.config import ParameterError
from labkit.lab.project import kind_of_path, reports_directory, runs_directory, write_file
from labkit.lab.runs.store import Run
from labkit.machine import describe_machine
from labkit.studies import LABS

CARD = "hand-in.json"
LARGEST = 50 * 2**20
NAME = re.compile(r"\w[\w .'-]{0,63}")


@dataclass(frozen=True)
class HandIn:
    """A zip as it was read: who, and the runs by lab; `problems` are runs that cannot be read, by lab."""

    name: str
    runs: dict[str, Run]
    problems: dict[str, str]


def write_hand_in(name: str, labs: Sequence[str], folder: Path, notebooks: Sequence[Path] = ()) -> Path:
    """Write `hand-in-<name>.zip` with the newest run of each lab that has one; return its path.

    `notebooks` are the student's own. ParameterError for a name that is none, a notebook that is not there, and if no
    lab was measured.
    """
    if not NAME.fullmatch(name):
        raise ParameterError(f"expected a name of letters, digits, blanks and .-'_, at most 64, got {name!r:.80}")
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
            archive.writestr(f"notebooks/{notebook.name}", _scrubbed_notebook(notebook))
        for lab, path in runs.items():
            archive.writestr(f"{lab}/run.jsonl", scrub_json(path.read_text()))
            if (page := reports_directory() / f"{lab}.html").is_file():
                archive.writestr(f"{lab}/{lab}.html", scrub_names(page.read_text(encoding="utf-8")))
    path = folder / f"hand-in-{name.replace(' ', '-')}.zip"
    write_file(path, file.getvalue())
    return path


def read_hand_ins(folder: Path) -> Iterator[HandIn]:
    """Yield each hand-in of a folder, by name. One that is damaged has a problem instead of runs."""
    for path in sorted(folder.rglob("*.zip")):
        try:
            with zipfile.ZipFile(path) as archive:
                yield _read(archive)
        except Exception as error:  # whatever a damaged or hostile zip makes of it, the others' page must come
            yield HandIn(path.stem.removeprefix("hand-in-"), {}, {"all": f"cannot be read: {error}"})


def _read(archive: zipfile.ZipFile) -> HandIn:
    card = json.loads(_content(archive, CARD))
    runs, problems = dict[str, Run](), dict[str, str]()
    with TemporaryDirectory(prefix="labkit-hand-in-") as folder:
        for lab in map(str, card["labs"]):
            copied = Path(folder) / "run.jsonl"
            try:
                copied.write_bytes(_content(archive, f"{lab}/run.jsonl"))
                run = Run.load(copied)
                if lab not in LABS or run.header.lab != lab:
                    raise ValueError(f"a run of {run.header.lab}, named {lab}")
                runs[lab] = run
            except (KeyError, ValueError) as error:
                problems[lab] = str(error).replace(str(copied), "run.jsonl")
    return HandIn(str(card["name"])[:64], runs, problems)


def _content(archive: zipfile.ZipFile, name: str) -> bytes:
    """A file of the zip. ValueError for more than `LARGEST` bytes, whatever the zip says of its size."""
    with archive.open(name) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"{name}: more than {LARGEST / 2**20:.0f} MiB")
    return content


def _scrubbed_notebook(path: Path) -> str:
    """The notebook without names and folders in its outputs' text; pictures stay as they are."""
    notebook = nbformat.read(path, as_version=4)
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        texts = output.get("data", output)
        for name in texts:
            if name in ("text", "text/plain", "text/html", "evalue"):
                texts[name] = scrub(texts[name])
        if "traceback" in output:
            output["traceback"] = [scrub(line) for line in output["traceback"]]
    return str(nbformat.writes(notebook))


def holds_hand_ins(name: str) -> bool:
    """Whether this names a folder with zips that students handed in, in it or below it."""
    return kind_of_path(name) == "folder" and any(map(_is_hand_in, Path(name).rglob("*.zip")))


def _is_hand_in(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return CARD in archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return path.name.startswith("hand-in-")
