"""How deep the searches of the tests go. `make test` takes a little of each; `make nightly` takes its time."""

from __future__ import annotations

import os

DEPTH = int(os.environ.get("PENSTOCK_TEST_DEPTH", "1"))
"""By how much more examples each search has."""
