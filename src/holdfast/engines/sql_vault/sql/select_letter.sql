SELECT l.id, l.queue, l.origin, l.state, l.message_id, l.type, l.exchange, l.routing_key, l.source_queue, l.reason,
    l.death_count, l.first_died_at, l.died_at, l.error_type, l.error_message, l.grp, l.redrive_id, l.redriven_count,
    l.revision, l.acked, l.captured_at, l.changed_at, l.body_bytes, l.digest, l.came_from,
    c.headers, c.shown, c.error_stack
FROM letters l JOIN contents c ON c.letter = l.id
