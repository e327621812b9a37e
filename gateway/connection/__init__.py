"""One client's connection: its packets in, its packets out."""
