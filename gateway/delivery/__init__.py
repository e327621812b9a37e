"""From light queues to clients: subscriptions, fan-out, retained messages, shared subscriptions."""
