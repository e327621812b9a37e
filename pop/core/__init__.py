"""POP without a network: groups, checkpoints, acknowledgements, revival and dead letters."""
