INSERT INTO tallies (queue, state, count) VALUES (:queue, :state, :count)
ON CONFLICT (queue, state) DO UPDATE SET count = tallies.count + excluded.count
