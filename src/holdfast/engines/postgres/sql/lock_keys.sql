-- Requests with dedupe keys or source ids for one queue come one after the other, from whichever server.
SELECT pg_advisory_xact_lock(1212106564, $1::bigint::integer)
