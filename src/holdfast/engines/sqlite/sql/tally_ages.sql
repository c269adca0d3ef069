SELECT
    (SELECT coalesce(sum(created_at - ?3), 0) FROM ready WHERE id BETWEEN ?1 AND ?2)
        + (SELECT coalesce(sum(created_at - ?3), 0) FROM leases WHERE id BETWEEN ?1 AND ?2),
    (SELECT coalesce(sum(leased_at - ?3), 0) FROM leases WHERE id BETWEEN ?1 AND ?2)
