"""How bytes reach the gateway: sockets, TLS, WebSocket, PROXY protocol, listeners."""
