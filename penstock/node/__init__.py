"""A node: configuration, composition, metrics, admin listener."""
