SELECT $2::bigint,
    (SELECT count(*) FROM holdfast.ready WHERE queue = $1::bigint AND partition = $2::bigint),
    (SELECT count(*) FROM holdfast.leases WHERE queue = $1::bigint AND partition = $2::bigint),
    (SELECT count(*) FROM holdfast.scheduled WHERE queue = $1::bigint AND partition = $2::bigint),
    (SELECT count(*) FROM holdfast.dying WHERE queue = $1::bigint AND partition = $2::bigint)
