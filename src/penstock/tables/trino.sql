-- The tables in a Trino catalog of the Delta Lake connector. Each query reads the newest version. Run it with that
-- catalog in use; the connector needs delta.register-table-procedure.enabled, the views a metastore that keeps views.

create schema if not exists penstock;

call system.register_table(schema_name => 'penstock', table_name => 'minute_rows', table_location => '$location/minute');
call system.register_table(schema_name => 'penstock', table_name => 'hour_rows', table_location => '$location/hour');
call system.register_table(schema_name => 'penstock', table_name => 'day_rows', table_location => '$location/day');
call system.register_table(schema_name => 'penstock', table_name => 'top_n_rows', table_location => '$location/top_n');
call system.register_table(schema_name => 'penstock', table_name => 'metrics', table_location => '$location/metrics');

create or replace view penstock.top_n as
with records as (
    select arbitrary("date") as "date", level, bucket, metric, "function", arbitrary(labels) as labels, series,
        arbitrary(record) as record, record_id, max(value) as value
    from penstock.top_n_rows group by level, bucket, metric, "function", series, record_id
), ranked as (  -- ties go to the record that sorts first
    select *, row_number() over (partition by level, bucket, metric, "function", series order by value desc,
        coalesce(element_at(record, ''), json_format(cast(record as json)))) as "rank" from records
)
select * from ranked where "rank" <= cast(regexp_extract("function", '([0-9]+)', 1) as integer);

-- for each level
-- A distinct count of a row that got more since the last fold is null: Trino has no such functions as the others.
create or replace view penstock.$level as
with opened as (
    select distinct "date", bucket, metric, "function", series from penstock.$level_rows where not is_final
), touched as (
    select one.*, element_at(one.distribution, -1)."index" as moment
    from penstock.$level_rows one join opened on one."date" = opened."date" and one.bucket = opened.bucket
        and one.metric = opened.metric and one."function" = opened."function" and one.series = opened.series
), counted as (  -- of `latest` only the newest time counts
    select *, "function" <> 'latest' or moment = max(moment)
        over (partition by bucket, metric, "function", series) as counts
    from touched
), states as (
    select "date", bucket, metric, "function", arbitrary(labels) as labels, series, sum("count") as "count",
        sum("sum") as "sum", min("min") as "min", max("max") as "max"
    from counted where counts group by "date", bucket, metric, "function", series
), entries as (
    select one.bucket, one.metric, one."function", one.series, entry."index",
        if(one."function" like 'distinct%', max(entry."count"), sum(entry."count")) as "count"
    from counted one cross join unnest(one.distribution) as entry ("index", "count") where one.counts
    group by one.bucket, one.metric, one."function", one.series, entry."index"
), distributions as (
    select bucket, metric, "function", series, array_agg(cast(row("index", "count")
        as row("index" bigint, "count" bigint)) order by "index") as distribution
    from entries group by bucket, metric, "function", series
), ranked as (
    select bucket, metric, "function", series,
        sum("count") over (partition by bucket, metric, "function", series order by "index") as reached,
        sum("count") over (partition by bucket, metric, "function", series) as points,
        if("index" = 0, 0e0, sign("index") * power(2e0, (abs("index") - 1048576)
            * power(2e0, -cast(regexp_extract("function", '([0-9]+)', 1) as double)))
            * (2e0 - 2e0 / (power(2e0, power(2e0, -cast(regexp_extract("function", '([0-9]+)', 1) as double))) + 1e0)))
            as middle
    from entries where "function" like 'percentile%'
), percentiles as (
    select bucket, metric, "function", series,
        min(middle) filter (where reached * 100 >= points * 50) as p50,
        min(middle) filter (where reached * 100 >= points * 75) as p75,
        min(middle) filter (where reached * 100 >= points * 90) as p90,
        min(middle) filter (where reached * 100 >= points * 95) as p95,
        min(middle) filter (where reached * 100 >= points * 99) as p99
    from ranked group by bucket, metric, "function", series
)
select s."date", s.bucket, s.metric, s."function", s.labels, s.series, s."count", s."sum", s."min", s."max",
    d.distribution,
    case split_part(s."function", '(', 1)
        when 'sum' then s."sum" when 'count' then cast(s."count" as double) when 'min' then s."min"
        when 'max' then s."max" when 'latest' then s."max"
        when 'cpm' then cast(s."count" as double) / $minutes when 'sum_per_min' then s."sum" / $minutes
        when 'percent' then s."sum" / nullif(s."count", 0) * 100 when 'rate' then s."sum" / nullif(s."count", 0) * 100
        when 'distinct' then cast(null as double) else s."sum" / nullif(s."count", 0) end as value,
    s."sum" / nullif(s."count", 0) as avg,
    least(greatest(p.p50, s."min"), s."max") as p50, least(greatest(p.p75, s."min"), s."max") as p75,
    least(greatest(p.p90, s."min"), s."max") as p90, least(greatest(p.p95, s."min"), s."max") as p95,
    least(greatest(p.p99, s."min"), s."max") as p99
from states s
left join distributions d on d.bucket = s.bucket and d.metric = s.metric and d."function" = s."function"
    and d.series = s.series
left join percentiles p on p.bucket = s.bucket and p.metric = s.metric and p."function" = s."function"
    and p.series = s.series
union all
select "date", bucket, metric, "function", labels, series, "count", "sum", "min", "max", distribution,
    value, avg, p50, p75, p90, p95, p99
from penstock.$level_rows one where is_final and not exists (
    select 1 from opened where opened."date" = one."date" and opened.bucket = one.bucket and opened.metric = one.metric
        and opened."function" = one."function" and opened.series = one.series);
