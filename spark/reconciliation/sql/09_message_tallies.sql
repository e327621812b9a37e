-- Messages counted by group and by what became of them.
WITH plain AS (
    SELECT s.group_id AS group_id, s.group_name AS group_name, CAST(count(*) AS BIGINT) AS messages
    FROM outcomes s LEFT JOIN unsettled u ON s.group_id = u.group_id AND s.message_position = u.message_position
    WHERE u.group_id IS NULL
    GROUP BY s.group_id, s.group_name
)
SELECT group_id, group_name, 'acked' AS outcome, messages, CAST(NULL AS BIGINT) AS first_popped_ms
FROM plain
UNION ALL
SELECT group_id, group_name, outcome, CAST(count(*) AS BIGINT) AS messages, min(first_popped_ms) AS first_popped_ms
FROM message_outcomes
GROUP BY group_id, group_name, outcome
