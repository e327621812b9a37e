"""The CommitLog as a Spark data source, and the reconciliation of checkpoints with their acknowledgements."""
