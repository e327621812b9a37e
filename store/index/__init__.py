"""The index: state derived from the log, in RocksDB."""
