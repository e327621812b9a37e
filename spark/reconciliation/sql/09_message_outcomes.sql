-- What became of these messages, for each group. An acknowledged delivery decides; else the last one does.
-- `last` is the key of the last stage times 16, plus the number of its outcome. What was queued or waited before comes before its
-- own stage, which may have an outcome.
WITH every AS (
    SELECT s.group_id AS group_id, s.group_name AS group_name, s.message_position AS message_position, s.key AS key,
           s.outcome AS outcome, s.attempt AS attempt, s.ended_ms AS ended_ms, s.popped_ms AS popped_ms
    FROM outcomes s
    UNION ALL
    SELECT a.group_id AS group_id, a.group_name AS group_name, a.message_position AS message_position, a.key AS key,
           'acked' AS outcome, a.attempt AS attempt, a.ended_ms AS ended_ms, a.popped_ms AS popped_ms
    FROM acks a JOIN unsettled u ON a.group_id = u.group_id AND a.message_position = u.message_position
    UNION ALL
    SELECT group_id, group_name, message_position, key - 1, 'revived', attempt, at_ms, popped_ms
    FROM open_before
    WHERE stage IN ('queued', 'waiting')
),
numbered AS (
    SELECT
        group_id, group_name, message_position, attempt, ended_ms, popped_ms, key,
        CASE outcome
            WHEN 'acked' THEN 0 WHEN 'acked_late' THEN 1 WHEN 'dead_lettered' THEN 2 WHEN 'expired' THEN 3 WHEN 'in_flight' THEN 4
            WHEN 'waiting' THEN 5 WHEN 'lost' THEN 6 WHEN 'voided' THEN 7 WHEN 'conflicting' THEN 8 WHEN 'unknown' THEN 9
            ELSE 10
        END AS number
    FROM every
),
merged AS (
    SELECT
        group_id, group_name, message_position,
        CAST(sum(CASE WHEN number = 0 THEN 1 ELSE 0 END) AS BIGINT) AS acks,
        max(CASE WHEN number = 1 THEN 1 ELSE 0 END) AS acked_late,
        max(CASE WHEN number = 8 THEN 1 ELSE 0 END) AS conflicting,
        max(key * 16 + number) AS last,
        max(attempt) AS attempts,
        min(popped_ms) AS first_popped_ms,
        max(ended_ms) AS last_ended_ms
    FROM numbered
    GROUP BY group_id, group_name, message_position
)
SELECT
    m.group_id AS group_id,
    m.group_name AS group_name,
    m.message_position AS message_position,
    m.attempts AS attempts,
    m.acks AS acks,
    m.first_popped_ms AS first_popped_ms,
    m.last_ended_ms AS last_ended_ms,
    CASE
        WHEN conflicting = 1 THEN 'conflicting'
        WHEN acks > 0 THEN 'acked'
        WHEN acked_late = 1 THEN 'acked_late'
        WHEN last % 16 = 2 THEN 'dead_lettered'
        WHEN last % 16 = 3 THEN 'expired'
        WHEN last % 16 = 4 THEN 'in_flight'
        WHEN last % 16 = 6 THEN 'lost'
        WHEN last % 16 = 7 THEN 'voided'
        WHEN last % 16 = 9 THEN 'unknown'
        WHEN v.position * 16 > m.last THEN 'voided'
        ELSE 'waiting'
    END AS outcome
FROM merged m LEFT JOIN voids v ON m.group_id = v.group_id
