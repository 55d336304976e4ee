"""Parts of a lab: points, runs, answers, figures, pages. Imports nothing: ranks need
`labkit.lab.point` alone."""
