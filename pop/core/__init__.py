"""POP without a network: groups, checkpoints, acknowledgements, revival, dead letters."""
