-- What a running node counts as well, by group: deliveries and waits without an end, messages that came back, and dead letters.
-- The group exists if it was created and not deleted. Only a check against a node reads this.
SELECT
    group_id,
    max(group_name) AS group_name,
    CAST(sum(CASE WHEN counter = 'in_flight' THEN 1 ELSE 0 END) AS BIGINT) AS in_flight,
    CAST(sum(CASE WHEN counter = 'returned' THEN 1 ELSE 0 END) AS BIGINT) AS returned,
    CAST(sum(CASE WHEN counter = 'dead_lettered' THEN 1 ELSE 0 END) AS BIGINT) AS dead_letters,
    CAST(sum(CASE WHEN counter = 'created' THEN 1 ELSE 0 END) AS BIGINT) AS created,
    CAST(sum(CASE WHEN counter = 'deleted' THEN 1 ELSE 0 END) AS BIGINT) AS deleted
FROM (
    SELECT s.group_id AS group_id, s.group_name AS group_name, 'in_flight' AS counter
    FROM outcomes s JOIN due d ON s.key = d.key
    WHERE s.cause IS NULL
    UNION ALL
    SELECT group_id, group_name, 'returned' AS counter
    FROM open_after
    WHERE stage = 'queued'
    UNION ALL
    SELECT group_id, group_name, cause AS counter
    FROM ends
    WHERE cause = 'dead_lettered' AND stage IS NOT NULL AND NOT repeated
    UNION ALL
    SELECT group_id, group_name, change AS counter
    FROM settings
    WHERE change IN ('created', 'deleted')
) every
GROUP BY group_id
