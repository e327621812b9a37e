"""The commands and their arguments, one module a family. A command imports its action only when it runs: `--help` is quick."""
