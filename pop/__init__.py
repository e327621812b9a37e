"""POP consumption: a popped message is invisible until it is acknowledged, or its invisible time is over."""
