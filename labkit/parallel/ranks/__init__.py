"""Processes that measure: forked by a server (`group.py`), or those of a torchrun job (`worker.JobGroup`)."""
