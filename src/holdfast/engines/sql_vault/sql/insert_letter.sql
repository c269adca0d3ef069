INSERT INTO letters (id, queue, origin, state, message_id, type, exchange, routing_key, source_queue, reason,
    death_count, first_died_at, died_at, error_type, error_message, grp, redrive_id, redriven_count, captured_at,
    changed_at, body_bytes, digest, came_from)
VALUES (:id, :queue, :origin, 'captured', :message_id, :type, :exchange, :routing_key, :source_queue, :reason,
    :death_count, :first_died_at, :died_at, :error_type, :error_message, :grp, :redrive_id, :redriven_count, :now,
    :now, :body_bytes, :digest, :came_from)
