SELECT id, name, reason, plan, state, wish, total, operation, started_at, started_by, why, holder, held_until
FROM redrives
