"""Replication: what each replica of a log must do so that nothing acknowledged is lost when a machine is."""
