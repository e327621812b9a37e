"""The admin API: what an operator may see of a running node and do to it, over HTTP and JSON."""
