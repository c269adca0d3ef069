"""AMQP 0-9-1 without a socket and without a clock: bytes in, events out; commands in, bytes out.

Read in this order: `table` and `properties` (what a message carries), `events`, `frames` (bytes → events),
`commands` (commands → bytes), `session` (the handshake and the state of a connection).
"""
