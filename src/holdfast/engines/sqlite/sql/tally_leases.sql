SELECT count(*), coalesce(sum(?3 - created_at), 0), coalesce(sum(?3 - leased_at), 0)
FROM leases WHERE id BETWEEN ?1 AND ?2
