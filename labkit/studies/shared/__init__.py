"""Parts that several labs share: labs never import one another."""
