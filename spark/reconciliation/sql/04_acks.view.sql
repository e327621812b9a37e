-- The deliveries that were acknowledged in time, and in no other way: nearly all. The writer has given each end to its stage, so
-- no join is needed to know them.
SELECT
    e.key AS key,
    e.group_id AS group_id,
    e.group_name AS group_name,
    e.message_position AS message_position,
    e.attempt AS attempt,
    coalesce(e.popped_ms, o.at_ms) AS popped_ms,
    e.at_ms AS ended_ms,
    coalesce(r.acks, 0) AS duplicate_acks
FROM ends e
LEFT JOIN repeats r ON e.key = r.key
LEFT JOIN open_before o ON e.key = o.key AND o.stage <> 'queued'
WHERE e.cause = 'acked'
  AND e.stage IN ('popped', 'extended')
  AND NOT e.repeated
  AND e.at_ms <= e.deadline_ms
  AND e.at_ms <= (SELECT as_of_ms FROM parameters)
  AND coalesce(r.others, 0) = 0
