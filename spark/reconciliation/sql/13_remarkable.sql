-- Deliveries of which a report may show some. Waits of returned messages are there if they are lost.
SELECT key, delivery_id, group_id, group_name, outcome, message_position, attempt, popped_ms, deadline_ms, ended_ms
FROM outcomes
WHERE outcome IN ('lost', 'conflicting', 'acked_late', 'dead_lettered', 'revived', 'unknown')
