-- Every checkpoint is joined with its end. A delivery that was acknowledged in time is in `acks`; each other one has a row here,
-- which is that of its last stage. A stage that was extended goes on in the next one, and a wait that is over ends in the retry
-- queue, so neither is a row. A row whose stage is `waiting` is no delivery: a consumer returned the message, and nobody has it,
-- or it became a dead letter after the wait. What has no end and is not open at the end has ended in a gap that retention has left.
WITH begun AS (
    SELECT key, delivery_id, stage, at_ms, deadline_ms, return_ms, group_id, group_name, message_position, attempt, at_ms AS popped_ms
    FROM deliveries
    WHERE at_ms <= (SELECT as_of_ms FROM parameters)
    UNION ALL
    SELECT key, delivery_id, stage, at_ms, deadline_ms, return_ms, group_id, group_name, message_position, attempt,
           coalesce(popped_ms, at_ms) AS popped_ms
    FROM open_before
    WHERE stage <> 'queued'
),
ended AS (
    SELECT key, at_ms, popped_ms, deadline_ms, cause
    FROM ends
    WHERE stage IS NOT NULL AND NOT repeated
),
joined AS (
    SELECT
        b.key AS key,
        b.delivery_id AS delivery_id,
        b.stage AS stage,
        b.group_id AS group_id,
        b.group_name AS group_name,
        b.message_position AS message_position,
        b.attempt AS attempt,
        coalesce(e.popped_ms, o.popped_ms, b.popped_ms) AS popped_ms,
        coalesce(e.deadline_ms, o.deadline_ms, b.deadline_ms) AS deadline_ms,
        coalesce(o.return_ms, b.return_ms) AS return_ms,
        CASE WHEN e.at_ms <= (SELECT as_of_ms FROM parameters) THEN e.at_ms END AS ended_ms,
        CASE WHEN e.at_ms <= (SELECT as_of_ms FROM parameters) THEN e.cause END AS cause,
        coalesce(r.acks, 0) AS second_acks,
        coalesce(r.others, 0) AS second_others,
        e.at_ms IS NOT NULL AS ends_later,
        o.key IS NOT NULL AS is_open
    FROM begun b
    LEFT JOIN ended e ON b.key = e.key
    LEFT JOIN due o ON b.key = o.key
    LEFT JOIN repeats r ON b.key = r.key
),
judged AS (
    SELECT
        key, delivery_id, stage, group_id, group_name, message_position, attempt, popped_ms, deadline_ms, return_ms, ended_ms, cause,
        CASE WHEN cause = 'acked' THEN second_acks ELSE 0 END AS duplicate_acks,
        CASE
            WHEN second_others > 0 OR (second_acks > 0 AND coalesce(cause, '') <> 'acked') THEN 'conflicting'
            WHEN cause = 'acked' AND ended_ms <= deadline_ms THEN 'acked'
            WHEN cause = 'acked' THEN 'acked_late'
            WHEN cause IN ('nacked', 'suspended', 'returned', 'dead_lettered', 'expired') THEN cause
            WHEN cause = 'timed_out' THEN 'revived'
            WHEN cause IN ('reset', 'deleted', 'last_member_left') THEN 'voided'
            WHEN cause IS NOT NULL THEN 'unknown'
            WHEN NOT ends_later AND NOT is_open THEN 'unknown'
            WHEN ends_later OR return_ms + (SELECT grace_ms FROM parameters) >= (SELECT as_of_ms FROM parameters)
                THEN CASE WHEN stage = 'waiting' THEN 'waiting' ELSE 'in_flight' END
            WHEN key < (SELECT damaged_until FROM parameters) THEN 'unknown'
            ELSE 'lost'
        END AS outcome
    FROM joined
    WHERE NOT (coalesce(cause, '') = 'extended' AND second_acks + second_others = 0)
      AND NOT (stage = 'waiting' AND cause IS NOT NULL AND cause <> 'dead_lettered' AND second_acks + second_others = 0)
)
SELECT *
FROM judged
WHERE outcome <> 'acked'
