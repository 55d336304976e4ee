"""Injected faults: each case at several moments, and after each the same questions (`check.py`).

    victim.py     the command line with one lab, `faulty`, in which the requested fault happens
    worker.py     what its ranks run
    check.py      what must hold after a fault

`make test` runs a part, `make faults` all of it. `tests/parallel/test_leftovers.py` has the kills
of processes.
"""
