"""The attention lab: what naive attention costs, and what compiling or tiling changes."""
