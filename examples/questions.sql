-- Questions to the tables. Each runs as it is in Spark SQL, after penstock.spark.register(spark, "tables"), and in
-- DuckDB, after the statements that `penstock tables sql --engine duckdb` prints. Dates are UTC.

-- p95 by service per hour, over all hosts of a service
select labels['service'] as service, bucket, penstock_percentile(penstock_merge(array_agg(distribution)), 0.95) as p95
from penstock.hour
where metric = 'request.duration' and date >= current_date - 1
group by 1, 2
order by 1, 2;

-- error rate per endpoint, in percent; the metric's function is percent
select labels['endpoint'] as endpoint, 100 * sum(sum) / sum(count) as error_rate
from penstock.hour
where metric = 'request.errors' and date >= current_date - 1
group by 1
order by 2 desc;

-- top 10 slow statements yesterday; the metric's function is top_n
select record['statement'] as statement, max(value) as slowest
from penstock.top_n
where metric = 'statement.duration' and level = 'minute' and date = current_date - 1
group by 1
order by 2 desc
limit 10;

-- orders of each shop, week over week
select labels['shop'] as shop,
    sum(case when date >= current_date - 7 then count end) as this_week,
    sum(case when date < current_date - 7 then count end) as the_week_before
from penstock.day
where metric = 'orders' and date >= current_date - 14 and date < current_date
group by 1
order by 1;

-- distinct users per day over all shops; the metric's function is distinct
select date, penstock_distinct(penstock_merge(array_agg(distribution))) as users
from penstock.day
where metric = 'users'
group by date
order by date;
