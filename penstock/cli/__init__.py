"""The command line. Each family of commands has a module with its arguments and what they do."""
