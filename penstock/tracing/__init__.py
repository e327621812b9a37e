"""Spans of the node by OpenTelemetry, for messages whose publishers sample them, and their export over OTLP."""
