"""`labkit check`: is every implementation right on this machine, and is the machine as fast as it was?"""
