-- Messages counted by group and by what became of them. Acknowledged deliveries whose message has no row in `message_outcomes` are
-- a message each.
WITH acknowledged AS (
    SELECT group_id, group_name, deliveries AS acks
    FROM tallies
    WHERE outcome = 'acked'
    UNION ALL
    SELECT group_id, group_name, -acks AS acks
    FROM message_outcomes
),
plain AS (
    SELECT group_id, group_name, CAST(sum(acks) AS BIGINT) AS messages
    FROM acknowledged
    GROUP BY group_id, group_name
)
SELECT group_id, group_name, 'acked' AS outcome, messages, CAST(NULL AS BIGINT) AS first_popped_ms
FROM plain
WHERE messages > 0
UNION ALL
SELECT group_id, group_name, outcome, CAST(count(*) AS BIGINT) AS messages, min(first_popped_ms) AS first_popped_ms
FROM message_outcomes
GROUP BY group_id, group_name, outcome
