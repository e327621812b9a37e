"""The durable heart of Penstock: one CommitLog, light queues over it, and the state that is derived from both."""
