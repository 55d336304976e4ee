"""The attention lab: what explicit attention costs in time and memory, and what compiling or tiling
changes."""
