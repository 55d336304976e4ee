"""Parts of a lab. Imports nothing: ranks need `labkit.lab.point` alone."""
