"""The lab of the tuned step: its page (`lab.py`) and what every rank runs (`worker.py`)."""
