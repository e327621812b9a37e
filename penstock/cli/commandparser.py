"""The parser of a command: an error is one line that names the argument, and a line that names the help."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class CommandParser(argparse.ArgumentParser):
    """A parser that shows its usage with `--help` only."""

    def error(self, message: str) -> NoReturn:
        """End the process with status 2 after one line that says what is wrong."""
        from penstock.store.printable import printable

        sys.stderr.write(printable(f"{self.prog}: {message}\nTry '{self.prog} --help'.\n", keep="\n"))
        sys.exit(EXIT_USAGE)
