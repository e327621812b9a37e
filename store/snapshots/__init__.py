"""Snapshots of the index beside the log."""
