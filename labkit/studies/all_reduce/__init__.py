"""The all-reduce lab: what averaging over ranks costs, and which algorithm is best."""
