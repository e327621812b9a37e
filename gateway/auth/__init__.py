"""Who may connect, publish, subscribe and receive."""
