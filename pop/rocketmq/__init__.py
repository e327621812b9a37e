"""`apache.rocketmq.v2.MessagingService` over the same core as the native API, for the official RocketMQ 5 clients.

A topic there is an MQTT topic or filter, percent-encoded; a consumer group is a POP group; a lite topic is a topic below its
parent. What a client may do, and how it is told that something is wrong, is the protocol's: see `status`.

Only `stubs` imports the package of the extra `rocketmq`, and only what needs its messages imports `stubs`.
"""
