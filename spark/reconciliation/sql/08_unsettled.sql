-- The messages of each group for which one acknowledged delivery is not the whole story.
SELECT group_id, message_position
FROM (
    SELECT group_id, message_position
    FROM outcomes
    UNION ALL
    SELECT a.group_id AS group_id, a.message_position AS message_position
    FROM acks a JOIN voids v ON a.group_id = v.group_id
    UNION ALL
    SELECT group_id, message_position
    FROM open_before
    WHERE stage IN ('queued', 'waiting')
) every
GROUP BY group_id, message_position
