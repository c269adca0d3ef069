-- A hint to other servers; nothing waits for it to reach the disk.
SELECT set_config('synchronous_commit', 'off', true), pg_notify('holdfast', payload)
FROM unnest($1::text[]) AS given (payload)
