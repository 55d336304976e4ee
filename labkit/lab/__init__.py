"""What makes a notebook a lab: studies, runs on disk, findings, figures, reports.

Kept free of imports: a rank that measures a point needs `labkit.lab.point` and nothing else of this package.
"""
