"""The all-reduce lab: what it costs to average a tensor over ranks, and which algorithm does it
best."""
