"""The tests of labkit: `make test`."""

import sys

# jsonschema, and so whatever imports nbformat, would build a grammar of IRIs of it: 1.2 s, for what
# no notebook holds.
sys.modules.setdefault("rfc3987_syntax", None)
