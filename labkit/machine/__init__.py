"""This computer: its devices, limits on this process, labkit's source, and others' load."""
