"""Metrics for Prometheus. Parts count in plain integers, which the collectors here read when a scrape asks for them."""
