"""What two labs share: studies never import one another."""
