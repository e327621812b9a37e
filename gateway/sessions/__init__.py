"""Sessions: what the server knows of a client beyond its connection."""
