-- Deliveries counted by group, hour of the pop, outcome, attempt and time. All figures of a report are sums of these rows.
-- `bucket_ms` is the time from the pop to the acknowledgement, or from the deadline to the return, rounded down to three digits.
WITH every AS (
    SELECT group_id, group_name, 'acked' AS outcome, attempt, duplicate_acks, popped_ms, ended_ms, ended_ms AS deadline_ms
    FROM acks
    UNION ALL
    SELECT group_id, group_name, outcome, attempt, duplicate_acks, popped_ms, ended_ms, deadline_ms
    FROM outcomes
    WHERE stage <> 'waiting'
),
timed AS (
    SELECT
        group_id, group_name, outcome, attempt, duplicate_acks, popped_ms,
        popped_ms - popped_ms % 3600000 AS hour_ms,
        CASE
            WHEN outcome IN ('acked', 'acked_late') THEN ended_ms - popped_ms
            WHEN outcome = 'revived' THEN ended_ms - deadline_ms
        END AS time_ms
    FROM every
),
bucketed AS (
    SELECT
        group_id, group_name, hour_ms, outcome, attempt, duplicate_acks, popped_ms,
        CASE
            WHEN time_ms < 1000 THEN time_ms
            WHEN time_ms < 10000 THEN time_ms - time_ms % 10
            WHEN time_ms < 100000 THEN time_ms - time_ms % 100
            WHEN time_ms < 1000000 THEN time_ms - time_ms % 1000
            WHEN time_ms < 10000000 THEN time_ms - time_ms % 10000
            WHEN time_ms < 100000000 THEN time_ms - time_ms % 100000
            WHEN time_ms < 1000000000 THEN time_ms - time_ms % 1000000
            ELSE time_ms - time_ms % 10000000
        END AS bucket_ms
    FROM timed
)
SELECT
    group_id,
    group_name,
    hour_ms,
    outcome,
    attempt,
    bucket_ms,
    CAST(count(*) AS BIGINT) AS deliveries,
    CAST(sum(duplicate_acks) AS BIGINT) AS duplicate_acks,
    min(popped_ms) AS first_popped_ms
FROM bucketed
GROUP BY group_id, group_name, hour_ms, outcome, attempt, bucket_ms
