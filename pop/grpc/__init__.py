"""The gRPC services of `penstock.pop.v1`."""
