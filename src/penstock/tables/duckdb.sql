-- The tables in DuckDB, without an extension: penstock.minute, .hour, .day, .top_n, .metrics, and three functions.
--
--     set variable penstock_tables = '/data/tables';     -- a folder of Delta or of Parquet tables
--     .read duckdb.sql
--     select labels['service'], bucket, p95 from penstock.hour where metric = 'order.duration';
--
-- The views hold what the tables held when this file was read: read it again for what is newer. They are made in
-- memory and leave nothing behind. `penstock tables sql --engine duckdb` prints this file for a place.

attach if not exists ':memory:' as penstock;
set disable_parquet_prefetching = true;  -- it fetches 1 MB for the labels of every row group, whatever they take

-- 1. The files that hold a table now, as its Delta log says, or the guards of its Parquet folders. A reader of files
-- takes a constant list that is not empty. So lists are variables, and `query` has a text for the case that there is none.

create or replace temp macro penstock_folder(name) as rtrim(getvariable('penstock_tables'), '/') || '/' || name;
create or replace temp macro penstock_version(file) as split_part(parse_filename(file), '.', 1);
create or replace temp macro penstock_find_checkpoint(name) as
    (select max(file) from glob(penstock_folder(name) || '/_delta_log/*.checkpoint.parquet'));
create or replace temp macro penstock_find_commits(name) as
    (select list(file) from glob(penstock_folder(name) || '/_delta_log/*.json')
     where penstock_version(file) > coalesce(penstock_version(getvariable('penstock_checkpoint')), ''));
create or replace temp macro penstock_find_guards(name) as
    (select list(file) from glob(penstock_folder(name) || '/*/_guard.json')
     where regexp_matches(file, '/(batch|final)-[^/]+/_guard.json$'));
create or replace temp macro penstock_find_files(name) as (
    with checkpoint as (from query(if(getvariable('penstock_checkpoint') is null,
            'select null::varchar as path where false',
            'select add.path as path from read_parquet(getvariable(''penstock_checkpoint'')) where add.path is not null'))),
        commits as (from query(if(getvariable('penstock_commits') is null,
            'select null::varchar as added, null::varchar as removed where false',
            'select add.path as added, remove.path as removed from read_json(getvariable(''penstock_commits''),
                format = ''newline_delimited'', maximum_object_size = 1000000000,
                columns = {add: ''struct(path varchar)'', remove: ''struct(path varchar)''})'))),
        guards as (from query(if(getvariable('penstock_guards') is null,
            'select null::varchar as folder, null::varchar[] as files, null::varchar[] as replaces where false',
            'select parse_path(filename)[-2] as folder, files, replaces from read_json(getvariable(''penstock_guards''),
                filename = true, columns = {files: ''varchar[]'', replaces: ''varchar[]''})'))),
        live as (
            (select path from checkpoint union all select added from commits where added is not null)
            except select removed from commits where removed is not null),
        kept as (
            select folder || '/' || unnest(files) as path from guards
            except select unnest(replaces) from guards),
        alone as (select parse_filename(file) as path from glob(penstock_folder(name) || '/metrics.parquet'))
    select list(penstock_folder(name) || '/' || path)
    from (select url_decode(path) as path from live union all from kept union all from alone));

-- 2. Rows as they lie there. The folder of a file with final rows is called so.

create or replace temp macro penstock_read(files) as 'from read_parquet(['
    || array_to_string(list_transform(files, lambda file: '''' || replace(file, '''', '''''') || ''''), ', ') || '])';
create or replace temp macro penstock_level_rows(files) as table
    select date, bucket, metric, "function", labels, series, count, sum, min, max, distribution,
        value, avg, p50, p75, p90, p95, p99
    from query(if(len(files) > 0, penstock_read(files), 'select null::date as date, null::timestamptz as bucket,
        null::varchar as metric, null::varchar as "function", null::map(varchar, varchar) as labels,
        null::varchar as series, null::bigint as count, null::double as sum, null::double as min, null::double as max,
        null::struct("index" bigint, count bigint)[] as distribution, null::double as value, null::double as avg,
        null::double as p50, null::double as p75, null::double as p90, null::double as p95, null::double as p99
        where false'));
create or replace temp macro penstock_record_rows(files) as table
    select date, level, bucket, metric, "function", labels, series, record, record_id, value, "rank"
    from query(if(len(files) > 0, penstock_read(files), 'select null::date as date, null::varchar as level,
        null::timestamptz as bucket, null::varchar as metric, null::varchar as "function",
        null::map(varchar, varchar) as labels, null::varchar as series, null::map(varchar, varchar) as record,
        null::varchar as record_id, null::double as value, null::bigint as "rank" where false'));
create or replace temp macro penstock_metric_rows(files) as table
    select metric, type, "function", unit, description, first_seen, last_seen
    from query(if(len(files) > 0, penstock_read(files), 'select null::varchar as metric, null::varchar as type,
        null::varchar as "function", null::varchar as unit, null::varchar as description,
        null::timestamptz as first_seen, null::timestamptz as last_seen where false'));
create or replace temp macro penstock_final(name) as
    list_filter(getvariable('penstock_' || name), lambda file: contains(file, '/final-'));
create or replace temp macro penstock_increments(name) as
    list_filter(getvariable('penstock_' || name), lambda file: not contains(file, '/final-'));

-- 3. Functions. They take the distributions of the views, whose entries say what they stand for.

create or replace temp macro penstock_merge(distributions) as
    flatten(list_filter(distributions, lambda one: one is not null));
-- Rounded before it goes up: 0.55 of 100 points is a little more than 55 in doubles.
create or replace temp macro penstock_percentile(distribution, fraction) as list_reduce(
    list_sort(list_transform(distribution, lambda one: {'value': one.value, 'count': one.count::double})),
    lambda so_far, one:
        if(so_far.count > 0, {'value': one.value, 'count': so_far.count - one.count}, so_far),
    {'value': null::double, 'count': greatest(1.0, ceil(round(
        list_sum(list_transform(distribution, lambda one: one.count))::double * fraction::double, 6)))}).value;
-- Ertl's estimator (arXiv 1702.01284): m² / (2 ln 2 · (m·σ(empty / m) + Σ 2^-rank)) of m registers. Of a register that
-- occurs twice the greater rank counts, which is the later one.
create or replace temp macro penstock_registers(distribution) as list_reduce(
    list_sort(list_transform(distribution, lambda one:
        {'index': one.index, 'rank': one.count, 'filled': 1.0::double, 'sum': pow(2.0, -one.count)})),
    lambda so_far, one: {'index': one.index, 'rank': one.rank,
        'filled': so_far.filled + if(one.index = so_far.index, 0.0, 1.0),
        'sum': so_far.sum + one.sum - if(one.index = so_far.index, pow(2.0, -so_far.rank), 0.0)},
    {'index': -1::bigint, 'rank': 0::bigint, 'filled': 0.0::double, 'sum': 0.0::double});
create or replace temp macro penstock_estimate(m, filled, sum) as if(filled = 0, 0.0, round(
    m * m / (2 * ln(2.0) * (sum + m * (1 - filled / m + list_sum(list_transform(range(1, 31),
        lambda n: pow(1 - filled / m, pow(2.0, n)) * pow(2.0, n - 1))))))));
create or replace temp macro penstock_distinct(distribution) as penstock_estimate(
    distribution[1].value, penstock_registers(distribution).filled, penstock_registers(distribution).sum);

-- 4. Final values, as the fold takes them.

create or replace temp macro penstock_name("function") as split_part("function", '(', 1);
create or replace temp macro penstock_numbers("function") as
    list_transform(string_split(regexp_extract("function", '\((.*)\)', 1), ','), lambda one: try_cast(one as double));
-- The middle 2·l·b/(b+1) of a bucket from l to l·b: as far from one end as from the other.
create or replace temp macro penstock_middle("index", width) as
    sign("index") * pow(2.0, (abs("index") - 1048576) * width) * 2 * pow(2.0, width) / (pow(2.0, width) + 1);
create or replace temp macro penstock_described("function", distribution) as case penstock_name("function")
    when 'percentile' then list_transform(distribution, lambda one: {'index': one.index, 'count': one.count,
        'value': penstock_middle(one.index, pow(2.0, -penstock_numbers("function")[1]))})
    when 'histogram' then list_transform(distribution, lambda one: {'index': one.index, 'count': one.count,
        'value': list_append(penstock_numbers("function"), 'inf'::double)[one.index + 1]})
    when 'distinct' then list_transform(distribution, lambda one: {'index': one.index, 'count': one.count,
        'value': pow(2.0, penstock_numbers("function")[1])})
    else list_transform(distribution, lambda one: {'index': one.index, 'count': one.count, 'value': null::double}) end;
create or replace temp macro penstock_value("function", count, sum, min, max, minutes, distribution) as
    case penstock_name("function")
    when 'sum' then sum
    when 'count' then count
    when 'min' then min
    when 'max' then max
    when 'latest' then max
    when 'cpm' then count / minutes
    when 'sum_per_min' then sum / minutes
    when 'percent' then sum / nullif(count, 0) * 100
    when 'rate' then sum / nullif(count, 0) * 100
    when 'distinct' then penstock_distinct(distribution)
    else sum / nullif(count, 0) end;
create or replace temp macro penstock_rank("function", distribution, fraction, min, max) as
    if(penstock_name("function") = 'percentile',
       least(greatest(penstock_percentile(distribution, fraction), min), max), null);

-- 5. Final rows that got nothing new, and others merged with their increments.

create or replace temp macro penstock_level(name, minutes) as table
    with increments as (from penstock_level_rows(penstock_increments(name))),
        final as (from penstock_level_rows(penstock_final(name))),
        open as (select distinct bucket, metric, "function", series from increments),
        touched as (
            from increments union all
            from final semi join open using (bucket, metric, "function", series)),
        counted as (  -- of `latest` only the newest time counts
            select * from touched qualify penstock_name("function") <> 'latest' or distribution[-1].index
                = max(distribution[-1].index) over (partition by bucket, metric, "function", series)),
        entries as (
            select bucket, metric, "function", series, entry.index as "index",
                if(penstock_name("function") = 'distinct', max(entry.count), sum(entry.count)::bigint) as count
            from (select bucket, metric, "function", series, unnest(distribution) as entry from counted)
            group by bucket, metric, "function", series, entry.index),
        distributions as (
            select bucket, metric, "function", series, penstock_described("function", listed) as distribution
            from (select bucket, metric, "function", series,
                    list({'index': "index", 'count': count} order by "index") as listed
                from entries group by bucket, metric, "function", series)),
        states as (
            select any_value(date) as date, bucket, metric, "function", any_value(labels) as labels, series,
                sum(count)::bigint as count, sum(sum) as sum, min(min) as min, max(max) as max
            from counted group by bucket, metric, "function", series)
    select date, bucket, metric, "function", labels, series, count, sum, min, max,
        penstock_described("function", distribution) as distribution, value, avg, p50, p75, p90, p95, p99
    from final anti join open using (bucket, metric, "function", series)
    union all
    select date, bucket, metric, "function", labels, series, count, sum, min, max, distribution,
        penstock_value("function", count, sum, min, max, minutes, distribution), sum / nullif(count, 0),
        penstock_rank("function", distribution, 0.50, min, max), penstock_rank("function", distribution, 0.75, min, max),
        penstock_rank("function", distribution, 0.90, min, max), penstock_rank("function", distribution, 0.95, min, max),
        penstock_rank("function", distribution, 0.99, min, max)
    from states left join distributions using (bucket, metric, "function", series);
create or replace temp macro penstock_top_n() as table
    with increments as (from penstock_record_rows(penstock_increments('top_n'))),
        final as (from penstock_record_rows(penstock_final('top_n'))),
        open as (select distinct level, bucket, metric, "function", series from increments),
        touched as (
            from increments union all
            from final semi join open using (level, bucket, metric, "function", series)),
        records as (
            select any_value(date) as date, level, bucket, metric, "function", any_value(labels) as labels, series,
                any_value(record) as record, record_id, max(value) as value
            from touched group by level, bucket, metric, "function", series, record_id),
        ranked as (  -- ties go to the record that sorts first
            select *, row_number() over (partition by level, bucket, metric, "function", series order by value desc,
                coalesce(record[''], to_json(record)::varchar)) as "rank" from records)
    from final anti join open using (level, bucket, metric, "function", series)
    union all
    from ranked where "rank" <= penstock_numbers("function")[1];

-- 6. What is there now, and the views.

set variable penstock_checkpoint = penstock_find_checkpoint('minute');
set variable penstock_commits = penstock_find_commits('minute');
set variable penstock_guards = penstock_find_guards('minute');
set variable penstock_minute = penstock_find_files('minute');
set variable penstock_checkpoint = penstock_find_checkpoint('hour');
set variable penstock_commits = penstock_find_commits('hour');
set variable penstock_guards = penstock_find_guards('hour');
set variable penstock_hour = penstock_find_files('hour');
set variable penstock_checkpoint = penstock_find_checkpoint('day');
set variable penstock_commits = penstock_find_commits('day');
set variable penstock_guards = penstock_find_guards('day');
set variable penstock_day = penstock_find_files('day');
set variable penstock_checkpoint = penstock_find_checkpoint('top_n');
set variable penstock_commits = penstock_find_commits('top_n');
set variable penstock_guards = penstock_find_guards('top_n');
set variable penstock_top_n = penstock_find_files('top_n');
set variable penstock_checkpoint = penstock_find_checkpoint('metrics');
set variable penstock_commits = penstock_find_commits('metrics');
set variable penstock_guards = penstock_find_guards('metrics');
set variable penstock_metrics = penstock_find_files('metrics');

create or replace view penstock.minute as from penstock_level('minute', 1.0);
create or replace view penstock.hour as from penstock_level('hour', 60.0);
create or replace view penstock.day as from penstock_level('day', 1440.0);
create or replace view penstock.top_n as from penstock_top_n();
create or replace view penstock.metrics as from penstock_metric_rows(getvariable('penstock_metrics'));
