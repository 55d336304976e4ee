"""Attention over a sequence that is cut over ranks: what it costs, sends and holds."""
