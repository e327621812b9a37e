"""The log as a source of Spark, `format("penstock")`: read once, or followed by a stream."""
