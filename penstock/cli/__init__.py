"""The command line: `commands` says what it accepts, `actions` does it."""
