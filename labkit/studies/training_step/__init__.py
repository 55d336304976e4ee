"""The lab of a training step: its page (`lab.py`) and what every rank runs (`worker.py`)."""
