"""The durable heart of Millrace: one CommitLog, light queues over it, and the state that is derived from both."""
