"""Benchmarks: Penstock beside other brokers, on the same machine, under the same load, in one run."""
