"""Attention over a sequence that is split across ranks: what it costs, sends and holds."""
