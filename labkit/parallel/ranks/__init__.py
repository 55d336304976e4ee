"""Processes that measure: forked by a server (`group.py`), or the ranks of a torchrun job (`torchrun.py`)."""
