"""What can go wrong with a node as a whole. Imports nothing: the command line knows these errors, whatever it runs."""

from __future__ import annotations


class ConfigError(Exception):
    """Raised when a configuration can't be read, names an option that doesn't exist, or gives one a value that doesn't fit."""


class AdminUnavailable(Exception):
    """Raised when the admin listener can't listen on its address."""
