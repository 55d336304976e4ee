"""`labkit advise`: which layouts fit and are fastest, what would change that, why a run is slow.

``request``              the options, checked, and the request that they make
``advice`` ``explain``   the answers as numbers, from `labkit.scaling`
``report``               the answers in words
``command`` ``notebook`` where they are read
"""
