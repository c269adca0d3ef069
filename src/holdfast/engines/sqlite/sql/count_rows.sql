SELECT id >> 53, 'queued', count(*) FROM ready GROUP BY id >> 53
UNION ALL SELECT id >> 53, 'leased', count(*) FROM leases GROUP BY id >> 53
UNION ALL SELECT id >> 53, 'scheduled', count(*) FROM scheduled GROUP BY id >> 53
UNION ALL SELECT id >> 53, 'dying', count(*) FROM dying GROUP BY id >> 53
