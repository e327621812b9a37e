"""Backups of a data directory: making, restoring and verifying them."""
