"""The servicers of the native API, `penstock.pop.v1`."""
