"""One suite of injected faults: each case at several moments, and after each the same questions (`check.py`).

    victim.py     the command line with one lab, `faulty`, in which whatever is asked for goes wrong
    worker.py     what its ranks run
    check.py      what must hold after a fault, and the table of cases, moments and outcomes

`make test` runs a part; `make faults` all of it, kills two hundred times, and prints the table.
"""
