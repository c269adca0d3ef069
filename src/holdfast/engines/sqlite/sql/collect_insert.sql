INSERT INTO transactions (id, state, producer, notify, series, created_at, updated_at, progress_at, owner, lease_deadline, request)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?6, ?6, ?7, ?8, ?9) ON CONFLICT (id) DO NOTHING
