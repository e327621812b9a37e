-- When each group was last reset or deleted.
SELECT group_id, max(position) AS position
FROM settings
WHERE change IN ('reset', 'deleted') AND at_ms <= (SELECT as_of_ms FROM parameters)
GROUP BY group_id
