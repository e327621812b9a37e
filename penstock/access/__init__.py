"""Access control: who acts, and what the rules of the operator let them do, over MQTT and gRPC alike."""
