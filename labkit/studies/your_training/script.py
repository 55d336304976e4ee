"""The changes that pay as a Python file, whose `setup` is the reader's with these changes."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

from labkit.lab.runs.store import Run
from labkit.studies.your_training.changes import CHANGES, in_order
from labkit.studies.your_training.gains import describe_effects, describe_gain, gains, sdpa_gains
from labkit.studies.your_training.lab import found

BUSY = "# The machine was busy: measure again before you change anything.\n"
NOTHING = "# Nothing that was tried makes this training faster.\n"
SDPA = "torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=...)"
FILE = '''\
"""The training of {name} with the changes that pay: save it beside that file."""

import torch

{unchanged}


def setup():
{body}


if __name__ == "__main__":
    model, batches, loss, optimizer = setup()
    for batch in batches:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
'''
ADAMW = """\
model, batches, loss = {call}
trained = [one for one in model.parameters() if one.requires_grad]
optimizer = torch.optim.AdamW(trained)"""


def script(run: Run) -> str:
    """Return Python that makes the changes that pay, each with what it gains.

    Of a busy run it makes none: other programs may have made the difference.
    """
    if run.is_busy:
        return BUSY
    results = run.results()
    table = gains(results).query("verdict == 'faster'").set_index("change", drop=False)
    by_hand = [
        f"# {row['line']}, attention {row['shape']}: {describe_gain(row)} with\n# {SDPA}\n"
        for row in sdpa_gains(results).query("verdict == 'faster'").to_dict("records")
    ]
    names = in_order(name for name in table.index if name in CHANGES)
    if not names:
        return "".join(by_hand) or NOTHING
    comments = {}
    for name in names:
        gain_and_effects = (describe_gain(table.loc[name]), describe_effects(table.loc[name]))
        comments[name] = f"{name}: {'; '.join(filter(None, gain_and_effects))}"
    has_optimizer = bool(found(results)["has_own_optimizer"].iloc[0])
    point = next(iter(run.header.planned.values()))
    text = setup_with(point["file"], point["arguments"], comments, has_optimizer=has_optimizer)
    return "\n".join([text, *by_hand])


def setup_with(
    target: str,
    arguments: Iterable[tuple[str, Any]],
    comments: Mapping[str, str],
    *,
    has_optimizer: bool,
) -> str:
    """Return a file whose `setup` calls that of `target`, and makes changes below comments."""
    path, _, function = target.rpartition(":")
    call = f"unchanged({', '.join(f'{name}={value!r}' for name, value in arguments)})"
    steps = [f"model, batches, loss, optimizer = {call}"]
    if not has_optimizer:
        steps = [ADAMW.format(call=call)]
    steps += [f"# {comment}\n{CHANGES[name].code.rstrip()}" for name, comment in comments.items()]
    steps.append("return model, batches, loss, optimizer")
    name = Path(path).name
    module = Path(path).stem
    unchanged = f"from {module} import {function} as unchanged"
    if not module.isidentifier():  # my-train.py
        unchanged = f'unchanged = import_module("{module}").{function}'
        unchanged = f"from importlib import import_module\n\n{unchanged}"
    body = indent("\n\n".join(steps), "    ")
    return FILE.format(name=name, unchanged=unchanged, body=body)
