-- Second ends: how many strays each stage has. An acknowledgement after the first one is harmless; the others are not.
SELECT
    key,
    CAST(sum(CASE WHEN cause IN ('acked', 'expired') THEN 1 ELSE 0 END) AS BIGINT) AS acks,
    CAST(sum(CASE WHEN cause IN ('acked', 'expired') THEN 0 ELSE 1 END) AS BIGINT) AS others
FROM (
    SELECT s.key AS key, s.cause AS cause
    FROM strays s JOIN deliveries d ON s.key = d.key
    UNION ALL
    SELECT s.key AS key, s.cause AS cause
    FROM strays s JOIN open_before o ON s.key = o.key
    WHERE o.stage <> 'queued'
) begun
GROUP BY key
