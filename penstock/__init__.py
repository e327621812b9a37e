"""Penstock: one durable log with an MQTT gate at the front and a timer wheel at the back.

This package puts the parts together: configuration, node, command line, admin listener.
"""

__version__ = "0.1.0"
