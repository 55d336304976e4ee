"""`labkit check`: is everything right on this machine, and is it as fast as it was?"""

# A quantity that is slower than its baseline by more than this share is status 3.
TOLERANCE = 0.05
