"""`apache.rocketmq.v2.MessagingService` over the core of the native API, for the official RocketMQ 5 clients.

A topic of the protocol is an MQTT topic or filter, percent-encoded. A consumer group is a POP group. A lite topic is a topic
below its parent topic. Errors are statuses of the protocol: see `status`.

Only `stubs` imports the package of the extra `rocketmq`, and only modules that need its messages import `stubs`.
"""
