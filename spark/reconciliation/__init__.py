"""The reconciliation of checkpoints with their acknowledgements: SQL over the Parquet tables, by Spark or by DuckDB."""
