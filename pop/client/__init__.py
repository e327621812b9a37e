"""The clients of `penstock.pop.v1`. They import no store."""
