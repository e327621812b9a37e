"""Access control of POP: who calls, and what each principal may publish, consume and administrate."""
