"""Instruments: clocks, memory meters, statistics. They know nothing of what they measure."""
