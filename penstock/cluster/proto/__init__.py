"""The part of etcd's gRPC API that Penstock calls."""
