"""The compiled core: `core.cpp`, and `build.py`, which makes a module of it where that can be."""
