"""The parser of a command: an error is one line that names the argument, and a line that names the help."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class CommandParser(argparse.ArgumentParser):
    """A parser that shows its usage with `--help` only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # argparse takes such an argument for a value. By its own pattern, -1s would be an option.
        self._negative_number_matcher = re.compile(r"-\.?[0-9].*", re.DOTALL)

    def error(self, message: str) -> NoReturn:
        """End the process with status 2 after one line that says what is wrong."""
        from penstock.store.printable import printable

        sys.stderr.write(printable(f"{self.prog}: {message}\nTry '{self.prog} --help'.\n", keep="\n"))
        sys.exit(EXIT_USAGE)
