"""Plain steps of a setup of planted_setups.py, for planted_causes.py.

    python benchmarks/plain_steps.py attention '{"is_planted": true}'

Each line of the input is a number of seconds: steps run for as long, and their median is printed.
"""

import json
import os
import sys
import time
from statistics import median
from typing import Any

import planted_setups
import torch


def main() -> None:
    name, arguments = sys.argv[1:]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model, batches, loss, optimizer = getattr(planted_setups, name)(**json.loads(arguments))

    def forever() -> Any:
        while True:
            yield from batches

    source = forever()

    def step() -> None:
        value = loss(model, next(source))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    for line in sys.stdin:
        end = time.perf_counter() + float(line)
        step()  # other processes have had the caches
        seconds = []
        while not seconds or time.perf_counter() < end:
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        print(median(seconds), flush=True)


if __name__ == "__main__":
    main()
