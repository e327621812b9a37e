"""The log on disk: segments, their records, and when they are durable."""
