"""Errors of a node as a whole. This module imports nothing, so that the command line can name the errors at no cost."""

from __future__ import annotations


class ConfigError(Exception):
    """Raised when a configuration cannot be read, names an unknown option, or gives an option a value out of its bounds."""


class ListenerExposed(ConfigError):
    """Raised when a listener would serve everybody beyond this machine without authentication, and no option says so."""


class DescriptorsTooFew(Exception):
    """Raised when the process may have fewer file descriptors than a node needs."""


class AdminUnavailable(Exception):
    """Raised when the admin listener cannot listen on its address."""


class ControlRefused(Exception):
    """Raised when a node refuses what a command asks of it on the control socket. The message says why."""


class NodeNotRunning(Exception):
    """Raised when no node listens on the control socket of a data directory."""
