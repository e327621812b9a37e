"""The worker: runs an application's handlers on the messages of groups. It imports the clients, and nothing of the node."""
