"""The MQTT gateway: codec, connections, sessions and subscriptions over the light queues."""
