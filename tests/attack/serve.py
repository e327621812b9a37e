"""`penstock` with a deliberate defect: python -m tests.attack.serve MUTATION ARGUMENTS."""

from __future__ import annotations

import sys

from penstock.cli.main import main
from tests.attack.mutations import mutate

if __name__ == "__main__":
    mutate(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
