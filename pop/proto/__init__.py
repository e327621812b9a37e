"""The definition of `penstock.pop.v1`, and the modules that `make proto` generates from it."""
