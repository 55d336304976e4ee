"""This computer (`description`, `gpus`), limits on this process (`cgroups`), labkit's source, and
others' load."""
