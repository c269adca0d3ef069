-- Changes of queues are decided one after the other, from whichever server.
SELECT holdfast.moment_us($1::bigint) FROM pg_advisory_xact_lock(1212106564, -1)
