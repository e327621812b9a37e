"""Jobs to copy: each is a file with functions from messages to tables, and a script that prints them."""
