-- The messages of each group for which one acknowledged delivery is not the whole story.
WITH every AS (
    SELECT s.group_id AS group_id, s.message_position AS message_position
    FROM outcomes s LEFT JOIN voids v ON s.group_id = v.group_id
    WHERE s.outcome <> 'acked' OR v.group_id IS NOT NULL
    UNION ALL
    SELECT group_id, message_position
    FROM open_before
    WHERE stage IN ('queued', 'waiting')
)
SELECT group_id, message_position
FROM every
GROUP BY group_id, message_position
