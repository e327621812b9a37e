"""The log as Parquet tables, a file per table and segment, which pandas, DuckDB, Spark and others read without Penstock."""
