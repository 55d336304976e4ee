"""Correctness of the labs' implementations, on every device and transport of this machine."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from labkit.lab.declaration import Lab
from labkit.lab.runs.measure import measure
from labkit.lab.runs.progress import Progress, ShowProgress
from labkit.lab.user_checks import Correctness, verdicts
from labkit.machine.description import describe_machine
from labkit.studies import load_lab

# Compiled naive attention is torch's, and slow to compile.
ATTENTION = ["tiled", "flash", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa"]
# Labs that compare results with an exact one before they time, with what makes each short.
LABS: Mapping[str, Mapping[str, Any]] = {
    "attention": {"implementations": ATTENTION},
    "all_reduce": {},
    "data_parallel": {},
    "sharding": {"optimizers": ["AdamW"]},
    "sync_batchnorm": {"alternatives": ["labkit", "torch"]},
}
ONCE = {"repeats": 1, "warmup": 0, "sessions": 1}


def check_correctness(
    show: ShowProgress, on_output: Callable[[str], None] | None
) -> Iterator[Correctness]:
    """Yield the verdict on each implementation at each place."""
    labs = [(device, *pair) for device in ("cpu", "cuda") for pair in _configured_labs(device)]
    with TemporaryDirectory(prefix="labkit-check-", ignore_cleanup_errors=True) as folder:
        for index, (device, lab, config) in enumerate(labs):
            show(Progress(index, len(labs), f"correct? {lab.name}, {device}"))
            run = measure(lab, config, profile="smoke", directory=Path(folder), on_output=on_output)
            yield from verdicts(lab, run)


def _configured_labs(device: str) -> Iterator[tuple[Lab, Any]]:
    """Yield labs with their shortest configs, reduced to checks; none without the device."""
    for name, parameters in LABS.items():
        lab = load_lab(name)
        names = lab.config.model_fields
        # A lab without the parameter has points of every backend: once is enough.
        if device == "cuda" and not ("device" in names and describe_machine().gpus):
            continue
        wanted = {**ONCE, **parameters, "device": device}
        values = {key: value for key, value in wanted.items() if key in names}
        yield lab.only_checks(), lab.configure("smoke", values)
