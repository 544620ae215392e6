"""The views in PostgreSQL, called as in Spark and DuckDB: one row per series and bucket, as of this second.

    penstock.minute  penstock.hour  penstock.day       final rows; those that have increments merged with them
    penstock.top_n                                     records with their ranks
    penstock.metrics                                   what is known of metrics
    penstock_percentile(distribution, fraction)        the value at any rank: 0.999
    penstock_merge(array_agg(distribution))            several distributions as one
    penstock_distinct(distribution)                    how many distinct values a sketch has seen

An entry of a distribution says in `value` what it stands for: the middle of a bucket, the greatest that a bound lets
in, the registers of a sketch.
"""

from collections.abc import Callable, Iterator
from string import Template

from penstock.model.exponential import OFFSET
from penstock.model.finals import rank_name
from penstock.model.function import FUNCTIONS, RANKS, Final, FunctionSpec, function_names_where
from penstock.model.level import Level
from penstock.tables.postgres_rows import TYPES
from penstock.tables.table_rows import TOP_N_ROWS, VALUES

VERSION = 1  # of the statements below: where the views are of another, they are made anew
# The schema of the views comes first for a role of the same name. Tables stay in the schema that they are in.
BESIDE_VIEWS = """select set_config('search_path', string_agg(quote_ident(one), ', '), false)
    from unnest(current_schemas(false)) as one
    where one <> 'penstock' or to_regclass('penstock.penstock_guard') is not null
    having count(*) > 0"""

_FUNCTIONS = """
create or replace function penstock_parameter(function text) returns double precision
    language sql immutable parallel safe return substring(function from '[(]([0-9.]+)[)]$$')::double precision;

create or replace function penstock_stands_for(function text, index bigint) returns double precision
    language sql immutable parallel safe return case
        when function like 'percentile(%' and index = 0 then 0
        when function like 'percentile(%' then sign(index)
            * power(float8 '2', (abs(index) - $offset) * power(float8 '2', -penstock_parameter(function)))
            * (2 - 2 / (power(float8 '2', power(float8 '2', -penstock_parameter(function))) + 1))
        when function like 'histogram(%' then
            nullif(split_part(trim(')' from substring(function from 11)), ',', index::int + 1), '')::double precision
        when function like 'distinct(%' then power(float8 '2', penstock_parameter(function))
    end;

create or replace function penstock_entries(function text, entries jsonb[]) returns jsonb
    language sql immutable parallel safe return (
        select jsonb_agg(jsonb_build_object(
            'index', index, 'count', count, 'value', penstock_stands_for(function, index)) order by index)
        from (
            select (entry ->> 'index')::bigint as index, case when function like 'distinct(%'
                then max((entry ->> 'count')::bigint) else sum((entry ->> 'count')::bigint)::bigint end as count
            from unnest(entries) as one, jsonb_array_elements(one) as entry group by 1) as merged);

create or replace function penstock_merge(distributions jsonb[]) returns jsonb
    language sql immutable parallel safe return (
        select jsonb_agg(entry) from unnest(distributions) as one, jsonb_array_elements(one) as entry);

create or replace function penstock_percentile(distribution jsonb, fraction double precision)
    returns double precision language sql immutable parallel safe return (
        select value from (
            select (entry ->> 'value')::double precision as value,
                sum((entry ->> 'count')::numeric) over (order by (entry ->> 'value')::double precision) as reached,
                sum((entry ->> 'count')::numeric) over () as points
            from jsonb_array_elements(distribution) as entry) as counted
        where reached >= greatest(ceil(round(points * fraction::numeric, 6)), 1) order by value limit 1);

create or replace function penstock_distinct(distribution jsonb) returns double precision
    language sql immutable parallel safe return (
        select coalesce(round(m * m / (2 * ln(float8 '2') * (total + m * (empty + case when empty = 0 then 0 else (
            select sum(exp(greatest(-700, power(float8 '2', n) * ln(empty))) * power(float8 '2', n - 1))
            from generate_series(1, 30) as n) end)))), 0)
        from (
            select max(m) as m, sum(power(float8 '2', -rank)) as total, 1 - count(*) / max(m) as empty
            from (
                select (entry ->> 'index')::bigint, max((entry ->> 'count')::bigint) as rank,
                    max((entry ->> 'value')::double precision) as m
                from jsonb_array_elements(distribution) as entry group by 1) as registers) as sketch);

create or replace function penstock_text(labels jsonb) returns text
    language sql immutable parallel safe return (
        select '{' || string_agg(to_json(key)::text || ':' || to_json(value)::text, ',' order by key collate "C") || '}'
        from jsonb_each_text(labels)) collate "C"
"""

_LEVEL = """
create or replace view penstock.$level as
with touched as (
    select distinct date, metric, function, series, bucket from penstock_$level where not is_final
), newest as (
    select one.*, case when one.function = 'latest' then (one.distribution -> -1 ->> 'index')::bigint end as moment,
        case when one.function = 'latest' then max((one.distribution -> -1 ->> 'index')::bigint) over (
            partition by one.date, one.metric, one.function, one.series, one.bucket) end as last_moment
    from penstock_$level as one join touched using (date, metric, function, series, bucket)
), merged as (
    select date, bucket, metric, function, min(labels::text)::jsonb as labels, series, sum(count)::bigint as count,
        sum(sum) as sum, min(min) as min, max(max) as max,
        penstock_entries(function, array_agg(distribution) filter (where distribution is not null)) as distribution
    from newest where moment is not distinct from last_moment group by date, bucket, metric, function, series
)
select date, bucket, metric, function, labels, series, count, sum, min, max, distribution, $value as value,
    sum / nullif(count, 0) as avg, $percentiles
from merged
union all
select date, bucket, metric, function, labels, series, count, sum, min, max,
    penstock_entries(function, array[distribution]), $values
from penstock_$level as one where is_final and not exists (
    select from penstock_$level as more where not more.is_final and more.date = one.date and more.series = one.series
        and more.metric = one.metric and more.function = one.function and more.bucket = one.bucket)
"""

_TOP_N = """
create or replace view penstock.top_n as
with greatest_of as (
    select date, level, bucket, metric, function, min(labels::text)::jsonb as labels, series,
        min(record::text)::jsonb as record, record_id, max(value) as value
    from penstock_top_n group by date, level, bucket, metric, function, series, record_id
), ranked as (
    select *, row_number() over (partition by date, level, bucket, metric, function, series
        order by value desc, penstock_text(record)) as rank from greatest_of)
select $columns from ranked where rank <= penstock_parameter(function)
"""


def view_statements() -> Iterator[str]:
    """What makes the schema, the functions and the views; the tables have to be there."""
    yield "create schema if not exists penstock"
    yield from Template(_FUNCTIONS).substitute(offset=OFFSET).strip().split(";\n\n")
    within = "least(greatest(penstock_percentile(distribution, {rank}), min), max)"
    ranks = ", ".join(
        f"case when function like 'percentile(%' then {within.format(rank=rank / 100)} end as {rank_name(rank)}"
        for rank in RANKS
    )
    for level in Level:
        yield Template(_LEVEL).substitute(
            level=level.value, value=_value(level), percentiles=ranks, values=", ".join(VALUES)
        )
    columns = [name for name in TOP_N_ROWS.names if name != "is_final"]
    yield Template(_TOP_N).substitute(columns=", ".join(columns))
    yield "create or replace view penstock.metrics as select * from penstock_metrics"
    yield f"comment on schema penstock is 'views of Penstock, version {VERSION}'"


def _value(level: Level) -> str:
    """What each function gives, as `penstock.model.finals` takes it."""
    cases = [
        f"when split_part(function, '(', 1) = any('{{{','.join(function_names_where(_gives(final)))}}}') "
        f"then {_final(final, level)}"
        for final in dict.fromkeys(spec.final for spec in FUNCTIONS.values() if spec.final)
    ]
    return f"case {' '.join(cases)} when function like 'distinct(%' then penstock_distinct(distribution) end"


def _gives(final: Final) -> Callable[[FunctionSpec], bool]:
    return lambda spec: spec.final == final


def _final(final: Final, level: Level) -> str:
    per = {"": "", "count": " / nullif(count, 0)", "minutes": f" / {level.minutes}"}[final.per]
    return f"{final.state}::{TYPES['double']}{per} * {final.factor}"
