-- What is counted by group only: its filter, and how often a consumer has extended a delivery.
SELECT
    coalesce(n.group_id, e.group_id) AS group_id,
    coalesce(n.group_name, e.group_name) AS group_name,
    n.topic_filter AS topic_filter,
    coalesce(e.extensions, 0) AS extensions
FROM (
    SELECT group_id, max(group_name) AS group_name, max(topic_filter) AS topic_filter
    FROM settings
    GROUP BY group_id
) n FULL OUTER JOIN (
    SELECT group_id, max(group_name) AS group_name, CAST(count(*) AS BIGINT) AS extensions
    FROM ends
    WHERE cause = 'extended' AND at_ms <= (SELECT as_of_ms FROM parameters)
    GROUP BY group_id
) e ON n.group_id = e.group_id
