-- What is open at the end, with the time by which each message must be back.
-- The node goes by the back-off that is in force at the deadline, so one that was raised after the pop counts.
SELECT
    o.key AS key,
    o.popped_ms AS popped_ms,
    o.deadline_ms AS deadline_ms,
    CASE WHEN r.return_ms > o.return_ms THEN r.return_ms ELSE o.return_ms END AS return_ms
FROM open_after o LEFT JOIN (
    SELECT o.key AS key, max(o.deadline_ms + s.backoff_ms) AS return_ms
    FROM open_after o JOIN settings s ON o.group_id = s.group_id
    WHERE s.change = 'changed'
      AND s.at_ms > o.at_ms
      AND s.at_ms <= o.deadline_ms
      AND s.attempt <= o.attempt
    GROUP BY o.key
) r ON o.key = r.key
WHERE o.stage <> 'queued'
