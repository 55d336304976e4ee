"""Parts of the command line: output in a terminal, `doctor`, `predict`."""
