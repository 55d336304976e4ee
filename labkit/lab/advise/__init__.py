"""`labkit advise`: a reader's options in, and `labkit.scaling`'s answer in words out."""
