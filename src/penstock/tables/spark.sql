-- The tables in the catalog of a Spark or Databricks that reads Delta. Each query reads the newest version.

create schema if not exists penstock;

create table if not exists penstock.minute_rows using delta location '$location/minute';
create table if not exists penstock.hour_rows using delta location '$location/hour';
create table if not exists penstock.day_rows using delta location '$location/day';
create table if not exists penstock.top_n_rows using delta location '$location/top_n';
create table if not exists penstock.metrics using delta location '$location/metrics';

create or replace function penstock.penstock_merge(
    distributions array<array<struct<index: bigint, count: bigint, value: double>>>)
returns array<struct<index: bigint, count: bigint, value: double>>
return flatten(array_compact(distributions));

-- Rounded before it goes up: 0.55 of 100 points is a little more than 55 in doubles.
create or replace function penstock.penstock_percentile(
    distribution array<struct<index: bigint, count: bigint, value: double>>, fraction double)
returns double
return aggregate(
    sort_array(transform(distribution, one -> struct(one.value, one.count))),
    named_struct('left', greatest(ceil(round(
        aggregate(distribution, 0D, (total, one) -> total + one.count) * fraction, 6)), 1D), 'value', cast(null as double)),
    (so_far, one) -> named_struct(
        'left', so_far.left - one.count, 'value', if(so_far.left > 0, one.value, so_far.value)),
    so_far -> so_far.value);

-- Ertl's estimator (arXiv 1702.01284): m² / (2 ln 2 · (m·σ(empty / m) + Σ 2^-rank)) of m registers. Of a register that
-- occurs twice the greater rank counts, which is the later one.
create or replace function penstock.penstock_distinct(
    distribution array<struct<index: bigint, count: bigint, value: double>>)
returns double
return aggregate(
    sort_array(transform(distribution, one -> struct(one.index, one.count))),
    named_struct('index', -1L, 'rank', 0L, 'filled', 0D, 'sum', 0D),
    (so_far, one) -> named_struct(
        'index', one.index, 'rank', one.count,
        'filled', so_far.filled + if(one.index = so_far.index, 0D, 1D),
        'sum', so_far.sum + pow(2D, -one.count) - if(one.index = so_far.index, pow(2D, -so_far.rank), 0D)),
    so_far -> if(so_far.filled = 0, 0D, round(
        pow(get(distribution, 0).value, 2) / (2 * ln(2D) * (so_far.sum + get(distribution, 0).value * aggregate(
            sequence(1, 30), 1 - so_far.filled / get(distribution, 0).value,
            (total, n) -> total + pow(1 - so_far.filled / get(distribution, 0).value, pow(2D, n)) * pow(2D, n - 1)))))));

create or replace view penstock.top_n as
with records as (
    select first(date) as date, level, bucket, metric, function, first(labels) as labels, series,
        first(record) as record, record_id, max(value) as value
    from penstock.top_n_rows group by level, bucket, metric, function, series, record_id
), ranked as (  -- ties go to the record that sorts first
    select *, row_number() over (partition by level, bucket, metric, function, series order by value desc,
        coalesce(record[''], to_json(record))) as rank from records
)
select * from ranked where rank <= cast(regexp_extract(function, '([0-9]+)', 1) as int);

-- for each level
create or replace view penstock.$level as
with open as (
    select distinct date, bucket, metric, function, series from penstock.$level_rows where not is_final
), counted as (  -- of `latest` only the newest time counts
    select *, function <> 'latest' or element_at(distribution, -1).index = max(element_at(distribution, -1).index)
        over (partition by bucket, metric, function, series) as counts
    from penstock.$level_rows left semi join open using (date, bucket, metric, function, series)
), states as (
    select date, bucket, metric, function, first(labels) as labels, series, sum(count) as count, sum(sum) as sum,
        min(min) as min, max(max) as max
    from counted where counts group by date, bucket, metric, function, series
), entries as (
    select bucket, metric, function, series, entry.index,
        if(function like 'distinct%', max(entry.count), sum(entry.count)) as count
    from (select bucket, metric, function, series, explode(distribution) as entry from counted where counts)
    group by bucket, metric, function, series, entry.index
), distributions as (
    select bucket, metric, function, series, sort_array(collect_list(struct(index, count))) as distribution
    from entries group by bucket, metric, function, series
), merged as (
    select date, bucket, metric, function, labels, series, count, sum, min, max, distribution,
        cast(null as double) as value, cast(null as double) as p50, cast(null as double) as p75,
        cast(null as double) as p90, cast(null as double) as p95, cast(null as double) as p99, false as is_final
    from states left join distributions using (bucket, metric, function, series)
    union all
    select date, bucket, metric, function, labels, series, count, sum, min, max, distribution,
        value, p50, p75, p90, p95, p99, true
    from penstock.$level_rows left anti join open using (date, bucket, metric, function, series) where is_final
), described as (  -- an entry says what it stands for: the middle 2·l·b/(b+1) of a bucket, a bound, the registers
    select *, split(regexp_extract(function, '[(](.*)[)]', 1), ',') as numbers,
        try_cast(regexp_extract(function, '[(](.*)[)]', 1) as double) as number from merged
), seen as (
    select * except (distribution, numbers, number), transform(distribution, one -> named_struct(
        'index', one.index, 'count', one.count, 'value', case
        when function like 'percentile%' then sign(one.index) * pow(2D, (abs(one.index) - 1048576) * pow(2D, -number))
            * 2 * pow(2D, pow(2D, -number)) / (pow(2D, pow(2D, -number)) + 1)
        when function like 'histogram%' then coalesce(cast(get(numbers, cast(one.index as int)) as double), double('inf'))
        when function like 'distinct%' then pow(2D, number) end)) as distribution
    from described
)
select date, bucket, metric, function, labels, series, count, sum, min, max, distribution,
    if(is_final, value, case split(function, '[(]')[0]
        when 'sum' then sum when 'count' then count when 'min' then min when 'max' then max when 'latest' then max
        when 'cpm' then count / $minutesD when 'sum_per_min' then sum / $minutesD
        when 'percent' then sum / nullif(count, 0) * 100 when 'rate' then sum / nullif(count, 0) * 100
        when 'distinct' then penstock.penstock_distinct(distribution) else sum / nullif(count, 0) end) as value,
    sum / nullif(count, 0) as avg,
    if(is_final or not function like 'percentile%', p50,
        least(greatest(penstock.penstock_percentile(distribution, 0.50D), min), max)) as p50,
    if(is_final or not function like 'percentile%', p75,
        least(greatest(penstock.penstock_percentile(distribution, 0.75D), min), max)) as p75,
    if(is_final or not function like 'percentile%', p90,
        least(greatest(penstock.penstock_percentile(distribution, 0.90D), min), max)) as p90,
    if(is_final or not function like 'percentile%', p95,
        least(greatest(penstock.penstock_percentile(distribution, 0.95D), min), max)) as p95,
    if(is_final or not function like 'percentile%', p99,
        least(greatest(penstock.penstock_percentile(distribution, 0.99D), min), max)) as p99
from seen;
