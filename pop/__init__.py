"""POP consumption: a message handed out is invisible until it is acknowledged or its time is over."""
