"""What a bug report needs, in one zip: machine, check, runs, failures with tracebacks, kernels; nothing personal."""

import getpass
import io
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from labkit.check.checking import CheckResult
from labkit.lab.commands.doctor import machine_rows
from labkit.lab.project import project_root, runs_directory, write_file
from labkit.lab.runs.store import Run, RunFileError
from labkit.machine import describe_machine
from labkit.studies import LABS

LARGEST_RUN = 5 * 2**20
ANYWHERE_ELSE = re.compile(r"(?<![\w:/<>.~-])/(?:[\w.@+-]+/)+(?=[\w.@+-])")
"""The folders of an absolute path; the name of the file stays."""
HOST = re.compile(r'"host": ?"([^"]+)"')
COMMON_NAMES = ("root", "user", "ubuntu", "admin")
"""Names of users that say nothing of a person, and are words of other texts."""


def write_bundle(path: Path, result: CheckResult, document: Mapping[str, Any]) -> None:
    """Write the zip, whole or not at all. `document` is the check's JSON. OSError if it cannot be written."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in _files(result, document):
            archive.writestr(name, scrub(text))
    write_file(path, file.getvalue())


def _files(result: CheckResult, document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "doctor.txt", "".join(f"{name}: {value}\n" for name, value in machine_rows())
    yield "machine.json", describe_machine().model_dump_json(indent=1)
    yield "check.json", json.dumps(document, indent=1)
    yield "check.jsonl", result.run.path.read_text()
    yield "kernels.txt", _kernels(result.run)
    for lab in LABS:
        newest = max((runs_directory() / lab).glob("*.jsonl"), default=None, key=lambda path: path.stat().st_mtime)
        if newest is None or newest.stat().st_size > LARGEST_RUN:
            continue
        yield f"runs/{lab}.jsonl", newest.read_text()
        if failures := _failures(newest):
            yield f"failures/{lab}.txt", failures


def _failures(path: Path) -> str:
    """Reason and details (traceback, last output of the rank) of each point that did not end well."""
    try:
        run = Run.load(path)
    except RunFileError as error:
        return str(error)
    return "\n\n".join(f"{point}: {reason}\n{details}" for point, reason, details in run.failures())


def _kernels(run: Run) -> str:
    """Registers and spilled bytes of each kernel of labkit that the check compiled on a GPU."""
    frame = run.frame().reindex(columns=["device", "kernel", "registers", "spills"]).dropna(subset="kernel")
    return frame.drop_duplicates().to_string(index=False) if len(frame) else "no kernels were launched\n"


def scrub(text: str) -> str:
    """The text without names of user and host, and without folders outside of the project."""
    places = {
        str(project_root()): "PROJECT",
        str(Path(__file__).parents[2]): "LABKIT",
        sys.prefix: "PYTHON",
        sys.base_prefix: "PYTHON",
        tempfile.gettempdir(): "TMP",
        str(Path.home()): "HOME",
    }
    for place, word in sorted(places.items(), key=lambda item: -len(item[0])):
        if len(place) > 1:
            text = text.replace(place, word)
    text = ANYWHERE_ELSE.sub("ELSEWHERE/", text)
    hosts = {describe_machine().host, *HOST.findall(text)}
    for name, word in [*((host, "host") for host in hosts), (getpass.getuser(), "user")]:
        if len(name) > 1 and name not in COMMON_NAMES:
            text = re.sub(rf"\b{re.escape(name)}\b", word, text)
    return text
