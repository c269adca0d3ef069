-- Insert if absent, and add what is new to the series' counts, in one statement.
WITH put AS (
    INSERT INTO holdfast.collect_parts (transaction_id, series, ordinal, path, size_bytes, sha256)
    SELECT $1::text, given.* FROM unnest($2::text[], $3::bigint[], $4::text[], $5::bigint[], $6::text[]) AS given (series, ordinal, path, size_bytes, sha256)
    ON CONFLICT DO NOTHING
    RETURNING series, size_bytes
)
INSERT INTO holdfast.collect_series AS known (transaction_id, series, stored_count, stored_bytes)
SELECT $1::text, series, count(*), sum(size_bytes)::bigint FROM put GROUP BY series
ON CONFLICT (transaction_id, series) DO UPDATE
SET stored_count = known.stored_count + excluded.stored_count, stored_bytes = known.stored_bytes + excluded.stored_bytes
