-- Strays counted by group and kind: `repeated` (the outcome of their delivery tells of them), `before` (the delivery began before
-- what was read), `damaged` (its beginning is in a range whose records are missing), or `orphan`.
SELECT
    s.group_id AS group_id,
    s.group_name AS group_name,
    CASE
        WHEN r.key IS NOT NULL THEN 'repeated'
        WHEN s.key < (SELECT begin_position FROM parameters) THEN 'before'
        WHEN p.damaged = 1 THEN 'damaged'
        ELSE 'orphan'
    END AS kind,
    CAST(count(*) AS BIGINT) AS ends
FROM strays s
LEFT JOIN repeats r ON s.key = r.key
LEFT JOIN (
    SELECT s.key AS key, s.position AS position,
           max(CASE WHEN s.key >= d.position AND s.key < d.until_position THEN 1 ELSE 0 END) AS damaged
    FROM strays s CROSS JOIN damages d
    GROUP BY s.key, s.position
) p ON s.key = p.key AND s.position = p.position
GROUP BY
    s.group_id,
    s.group_name,
    CASE
        WHEN r.key IS NOT NULL THEN 'repeated'
        WHEN s.key < (SELECT begin_position FROM parameters) THEN 'before'
        WHEN p.damaged = 1 THEN 'damaged'
        ELSE 'orphan'
    END
