SELECT grp, count(*) FROM letters WHERE id IN_IDS GROUP BY grp
