"""Your own training: what its step costs, and what each change to it would gain."""
