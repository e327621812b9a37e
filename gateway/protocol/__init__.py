"""The packets of MQTT as bytes and as values. Knows no socket and no session."""
