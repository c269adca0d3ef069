-- Several requests of one batch: their leases are locked in one order, whatever the order of the requests.
SELECT id FROM holdfast.leases WHERE id = ANY ($1::bigint[]) ORDER BY id FOR UPDATE
