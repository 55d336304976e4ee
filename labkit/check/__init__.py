"""`labkit check`: is every implementation right on this machine, and is the machine as fast as it
was?"""

TOLERANCE = 0.05
"""Share by which a quantity may be slower than its baseline."""
