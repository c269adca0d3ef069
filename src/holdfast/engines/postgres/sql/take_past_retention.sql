-- Queued dead letters that died before $3 moment or null, less $5 retention; $4 how many.
WITH old AS MATERIALIZED (
    SELECT items.id, items.died_at FROM holdfast.items CROSS JOIN LATERAL (
        SELECT ready.id FROM holdfast.ready
        WHERE ready.queue = $1::bigint AND ready.partition = $2::bigint AND ready.id = items.id OFFSET 0) AS queued
    WHERE items.queue = $1::bigint AND items.died_at IS NOT NULL
        AND items.died_at <= (SELECT holdfast.moment_us($3::bigint) - $5::bigint) AND items.partition + 0 = $2::bigint
    ORDER BY items.died_at LIMIT $4::bigint
), picked AS (
    SELECT held.place, old.died_at FROM old CROSS JOIN LATERAL (
        SELECT ctid AS place FROM holdfast.ready
        WHERE queue = $1::bigint AND partition = $2::bigint AND id = old.id FOR UPDATE SKIP LOCKED) AS held
), taken AS (
    DELETE FROM holdfast.ready WHERE ctid = ANY (ARRAY (SELECT place FROM picked))
    RETURNING id, created_at, expire_at, attempts
)
SELECT id, created_at, expire_at, attempts FROM taken ORDER BY id
