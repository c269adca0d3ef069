INSERT INTO redrives (id, operation, state, name, reason, plan, wish, total, started_at, started_by, why)
VALUES (:id, :operation, 'running', :name, :reason, :plan, :wish, :total, :now, :actor, '')
