-- Ends that the writer could not give to an open stage: a second end of a stage, an end without a beginning, or one whose
-- beginning is older than the tables. There are none or few.
SELECT e.key AS key, e.delivery_id AS delivery_id, e.position AS position, e.at_ms AS at_ms, e.cause AS cause,
       e.group_id AS group_id, e.group_name AS group_name
FROM ends e
WHERE (e.stage IS NULL OR e.repeated) AND e.at_ms <= (SELECT as_of_ms FROM parameters)
