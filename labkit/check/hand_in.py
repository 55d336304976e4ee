"""A student's hand-in: a zip of the newest run of each lab, the last check, pages and notebooks."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from labkit.check.archives import CARD, MAX_BYTES, newest_run, write_zip
from labkit.lab.commands.console import err
from labkit.lab.config import ParameterError
from labkit.lab.pages.record import read_record
from labkit.lab.pages.report import export_page
from labkit.lab.project import project_root, runs_directory
from labkit.lab.runs.store import Run
from labkit.lab.user_checks import check_file
from labkit.machine.description import describe_machine
from labkit.studies import load_lab

# Characters without a shape of their own that belong to names, as in Hindi and Persian.
JOINERS = "\u200c\u200d"
# Who types these means a path, or copied a page.
NOT_IN_NAMES = '/\\:*?"<>|'


def write_hand_in(
    name: str, labs: Sequence[str], folder: Path, notebooks: Sequence[Path] = ()
) -> Path:
    """Write `hand-in-<name>.zip` with the newest run, check and page of each lab; return its path.

    Raises ParameterError for an unusable name, a notebook that is none, a damaged run, and if no
    lab was measured or checked.
    """
    name = normalize_name(name)
    # Read before anything is written: a refusal leaves no half of a zip.
    texts = [read_notebook(notebook) for notebook in notebooks]
    runs = {lab: newest_run(lab) for lab in labs}
    handed_in = [lab for lab in labs if runs[lab] is not None or check_file(lab).is_file()]
    if not handed_in:
        raise ParameterError(
            f"nothing to hand in: no run of {', '.join(labs)} in {runs_directory()}"
        )
    card = {"name": name, "labs": handed_in, "labkit": str(describe_machine().source)}
    files = {CARD: json.dumps(card)}
    for path, file_name, text in zip(notebooks, _file_names(notebooks), texts, strict=True):
        files[f"notebooks/{file_name}"] = text
        page = _page_of_notebook(path, text, handed_in)
        if page is not None:
            files[f"notebooks/{Path(file_name).stem}.html"] = page
    for lab in handed_in:
        if check_file(lab).is_file():
            files[f"{lab}/check.json"] = check_file(lab).read_text("utf-8", "replace")
        run = runs[lab]
        if run is not None:
            # Read as the teacher will: a damaged run is refused while it can be measured again.
            Run.load(run)
            files[f"{lab}/run.jsonl"] = run.read_text(encoding="utf-8")
            page = _page_of_run(lab, run)
            if page is not None:
                files[f"{lab}/{lab}.html"] = page
    path = folder / f"hand-in-{safe_file_name(name)}.zip"
    write_zip(path, files)
    return path


def normalize_name(name: str) -> str:
    """Return a name in the one form in which it is compared (NFC), without outer or double blanks.

    Keyboards differ in how they type an accent, and what is copied brings marks of direction along.
    ParameterError for a name without letters, or with characters that no name has.
    """
    visible = "".join(
        char for char in name if unicodedata.category(char) != "Cf" or char in JOINERS
    )
    normal = " ".join(unicodedata.normalize("NFC", visible).split())
    # Categories of Unicode: letters (L), digits (N), control characters and the like (C).
    kinds = {unicodedata.category(char)[0] for char in normal if char not in JOINERS}
    is_known = "C" not in kinds and not set(normal) & set(NOT_IN_NAMES)
    if not (is_known and kinds & {"L", "N"} and len(normal) <= 64):
        raise ParameterError(
            f"expected a name with letters or digits, at most 64 characters, none of"
            f" {' '.join(NOT_IN_NAMES)}, got {name!r:.80}"
        )
    return normal


def safe_file_name(name: str) -> str:
    """Return a name for files: ASCII, which every system and platform keeps, and unique."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    safe = re.sub(r"[^A-Za-z0-9]+", "-", plain).strip("-")
    if safe == name.replace(" ", "-"):
        return safe
    # José and Jose are two students, and a name in Hindi leaves no letter at all.
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{safe}-{digest}".strip("-")


def read_notebook(path: Path) -> str:
    """Return the text of a notebook. ParameterError for a file that is none."""
    if not path.is_file():
        raise ParameterError(f"{path}: no such notebook")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ParameterError(
            f"{path}: {size >> 20} MiB, expected a notebook of at most {MAX_BYTES >> 20}; clear the"
            " outputs of its largest cells"
        )
    try:
        # Editors on Windows begin a file with a byte-order mark, which is no JSON.
        text = path.read_text(encoding="utf-8-sig")
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not (isinstance(content, dict) and isinstance(content.get("cells"), list)):
        kind = "an empty file" if size == 0 else "it is no JSON in UTF-8 with cells"
        raise ParameterError(f"{path}: expected a notebook, and {kind}")
    return text


def _file_names(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the name of each file; a number tells equal names apart."""
    taken = set[str]()
    for path in paths:
        name = path.name
        number = 1
        while name in taken:
            number += 1
            name = f"{path.stem}-{number}{path.suffix}"
        taken.add(name)
        yield name


def _page_of_notebook(path: Path, text: str, labs: Sequence[str]) -> str | None:
    """Return a student's notebook as a page; None if it opens none of the labs, or is too odd."""
    lab = next((lab for lab in labs if f"labkit.studies.{lab}." in text), None)
    if lab is None:
        return None
    with TemporaryDirectory(prefix="labkit-page-") as folder:
        page = Path(folder) / "page.html"
        try:
            export_page(path, page, load_lab(lab))
        # Any cell may be anything: the notebook itself is handed in.
        except Exception as error:
            err.print(f"{path}: no page of it ({error})")
            return None
        return page.read_text(encoding="utf-8")


def _page_of_run(lab: str, run: Path) -> str | None:
    """Return the lab's page if it shows this run, or None: another run's would mislead."""
    page = project_root() / "reports" / f"{lab}.html"
    shown = read_record(load_lab(lab), page.with_suffix(".json")).run
    if shown is None or Path(shown).name != run.name or not page.is_file():
        return None
    return page.read_text(encoding="utf-8", errors="replace")
