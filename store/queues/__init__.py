"""Light queues over the log, and the routes from topics to them."""
