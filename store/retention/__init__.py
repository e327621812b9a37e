"""Dropping old segments, and what must outlive them."""
