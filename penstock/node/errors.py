"""Errors of a node as a whole. This module imports nothing, so that the command line can name the errors at no cost."""

from __future__ import annotations


class ConfigError(Exception):
    """Raised when a configuration cannot be read, names an unknown option, or gives an option a value out of its bounds."""


class AdminUnavailable(Exception):
    """Raised when the admin listener cannot listen on its address."""
