"""A start after a crash, and the repair of a damaged log."""
