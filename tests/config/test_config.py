"""The configuration: one precedence, problems with their places, every key three ways."""

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner

from penstock.cli.main import main
from penstock.config.destinations import DESTINATIONS, ExporterSection, ExporterType
from penstock.config.load import LoadedConfig, load
from penstock.config.schema import NAME, ConfigKey, KeyKind, schema_of
from penstock.config.show import config_as_yaml, config_template
from penstock.config.tree import ServiceConfig
from penstock.config.yaml_document import parse_config_document
from penstock.errors import ConfigError
from penstock.model.definition_file import load_definitions
from penstock.receive.config import ReceiversConfig
from penstock.service.receiver_set import RECEIVERS
from penstock.spool import FullBehavior

ROOT = Path(__file__).parents[2]
KEYS = [key for key in schema_of(ServiceConfig).walk() if NAME not in key.path]
OWN = {
    "rules": "drop debug.*,drop_labels http.* user session",
    "listen": "127.0.0.1:4999",
    "host": "localhost",
    "url": "amqp://elsewhere/",
    "otlp_path": "/x",
    "remote_write_path": "/x",
    "events_path": "/x",
    "ca_file": "/dev/null",
    "cert_file": "/dev/null",
    "key_file": "/dev/null",
    "client_ca_file": "/dev/null",
}
SEED = """
exporter:
  queue:
    type: disk
    enabled: true
    path: ./queue
    max_size: 10000
    max_bytes: 1Gi
    full_behavior: drop_oldest
    inmemory_blocks: 2048
    chunk_size: 512Mi
    meta_sync_interval: 1s
    write_buffer_size: 256Ki
    compression: snappy
    always_queue: true
    workers: 0
    backoff:
      enabled: true
      multiplier: 2.0
    circuit_breaker:
      enabled: true
      threshold: 5
      reset_timeout: 30s
    pipeline_split:
      enabled: false
      preparer_count: 0
      sender_count: 0
      channel_size: 256
    adaptive_workers:
      enabled: false
      min_workers: 1
      max_workers: 0
"""


def of(text: str = "", **more: Any) -> LoadedConfig[ServiceConfig]:
    return load(ServiceConfig, text=text, **more)


def problems(text: str = "", **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        of(text, **more)
    return str(caught.value).splitlines()


def value_of(config: object, path: tuple[str, ...]) -> object:
    for word in path:
        config = getattr(config, word)
    return config


def test_a_flag_wins_over_the_environment_the_environment_over_the_file_the_file_over_the_default() -> None:
    file = "admin: {listen: '127.0.0.1:2'}"
    environ = {"PENSTOCK_ADMIN_LISTEN": "127.0.0.1:3"}
    flags = {"--admin-listen": "127.0.0.1:4"}

    assert of().config.admin.listen == "127.0.0.1:9109"
    assert of(file).config.admin.listen == "127.0.0.1:2"
    assert of(file, environ=environ).config.admin.listen == "127.0.0.1:3"
    assert of(file, environ=environ, flags=flags).config.admin.listen == "127.0.0.1:4"


def test_a_layer_replaces_single_keys_and_leaves_their_neighbours() -> None:
    config = of("exporter: {queue: {workers: 3, max_size: 7}}", flags={"--exporter-queue-workers": "5"}).config

    assert (config.exporter.queue.workers, config.exporter.queue.max_size) == (5, 7)


def test_the_queue_section_of_the_seed_is_taken_as_it_is() -> None:
    queue = of(SEED).config.exporter.queue

    assert queue.max_bytes == 2**30
    assert queue.full_behavior is FullBehavior.DROP_OLDEST


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_key_is_a_flag_and_an_environment_variable(key: ConfigKey) -> None:
    text = example(key)
    # A certificate is of no use without its key, nor the key without its certificate.
    beside = {
        one.flag: example(one)
        for one in KEYS
        if one.path[:-1] == key.path[:-1]
        and (one.default is MISSING or (key.path[-1], one.path[-1]) == ("key_file", "cert_file"))
    }
    by_flag = of(flags={**beside, key.flag: text}).config
    by_variable = of(environ={key.variable: text}, flags={k: v for k, v in beside.items() if k != key.flag}).config

    assert by_flag == by_variable
    assert by_flag != ServiceConfig()


def example(key: ConfigKey) -> str:
    """A text that the key takes, different from its default where there is a choice."""
    if key.name == "pipelines.rollup":
        return "false"
    if key.kind is KeyKind.BOOL:
        return "false" if key.default else "true"
    if key.path[-1] in OWN:
        return OWN[key.path[-1]]
    return {
        KeyKind.INT: "3",
        KeyKind.FLOAT: "0.75" if key.path[-1] != "multiplier" else "3",
        KeyKind.SIZE: "3Mi",
        KeyKind.DURATION: "90s",
        KeyKind.TEXT: "word",
        KeyKind.PATH: "./somewhere",
        KeyKind.CHOICE: key.choices[-1 if key.default != key.choices[-1] else 0] if key.choices else "",
        KeyKind.TEXTS: "a,b",
        KeyKind.TABLE: "a=b,c=d",
    }[key.kind]


def test_the_short_flags_of_the_queue_are_keys_of_the_exporter() -> None:
    ran = CliRunner().invoke(main, ["config", "show", "--origin", "--queue-max-bytes", "2Gi"])
    assert re.search(r"max_bytes: 2Gi +# --queue-max-bytes", ran.output), ran.output


def test_problems_name_key_value_bound_and_line_and_come_all_at_once() -> None:
    text = "exporter:\n  queue:\n    circuit_breaker:\n      threshold: 0\n    workers: -1\nadmin:\n  listen: 80\n"

    assert problems(text) == [
        "configuration:7: admin.listen must be text, got 80",
        "configuration:4: exporter.queue.circuit_breaker.threshold must be a whole number >= 1, got 0",
        "configuration:5: exporter.queue.workers must be a whole number >= 0, got -1",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exporter: {queue: {max_byts: 1}}", "1: exporter.queue.max_byts is not a setting; did you mean max_bytes?"),
        ("\nadmn: {}", "2: admn is not a setting; did you mean admin?"),
        ("spark:\n  trigger: 2 weeks", "2: spark.trigger must be a duration like 30 (seconds), '30s' or '1m30s'"),
        ("exporter: {queue: {max_bytes: lots}}", "1: exporter.queue.max_bytes must be a size like"),
        ("processes: 0", "1: processes must be >= 1, got 0"),
        ("processes: two", "1: processes must be a whole number, got 'two'"),
        ("logging: {level: loud}", "1: logging.level must be one of debug, info, warning, error, got 'loud'"),
        ("admin: 5", "1: admin must be a mapping of keys, got 5"),
        ("pipelines: {relay: false, rollup: false}", "1: pipelines.rollup must be true where relay is false"),
        ("exporter: {type: otlp_http, url: 'ftp://x'}", "1: exporter.url must look like http://host:port/path"),
        ("exporter: {type: otlp_http}", "1: exporter.url must say where the otlp_http destination is"),
        ("exporters:\n  b: {url: x}", "2: exporters.b.type must say what the destination speaks"),
        ("exporters:\n  B-2: {}", "2: exporters.B-2: a name must be a lower-case letter"),
        ("segments: {writer: a/b}", "1: segments.writer must be letters, digits"),
        ("segments: {queue: {order: fifo}}", "1: segments.queue.order has no effect here: segments are sealed"),
        ("segments:\n  queue: {workers: 3}", "2: segments.queue.workers has no effect here: one thread seals"),
        ("segments: {queue: {failover: {max_size: 3}}}", "1: segments.queue.failover has no effect here: what the"),
        ("receivers: {grpc: {limits: {max_json: 1Mi}}}", "1: receivers.grpc.limits.max_json has no effect here: gRPC"),
        ("a: [\n", "2: not YAML"),
        ("processes: 1\nprocesses: 2", "2: processes is set twice, first in line 1"),
        ("a: &a [*a]", " not YAML: a value contains itself"),
        ("a: " + "[" * 5000, " not YAML: it is nested too deep"),
        ("a: 2026-99-99", " not YAML: month must be in 1..12"),
        ("a: !!python/object/apply:os.system ['true']", "1: not YAML: !!python/object/apply:os.system is not allowed"),
    ],
)
def test_a_problem_says_what_is_wrong_and_where(text: str, expected: str) -> None:
    assert problems(text)[0].startswith(f"configuration:{expected}"), problems(text)


OUT = "exporter: {type: otlp_http, url: '%s'}\n"
ALL = "receivers: {http: {host: %s, insecure: true, port: 4444}, grpc: {enabled: false}}\n"
RABBIT = "receivers: {amqp: {enabled: true, url: 'amqp://me:secret@localhost/', queue: q}}\n"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (OUT % "http://127.0.0.1:4318", "exporter.url"),
        (OUT % "http://localhost:4318/v1/metrics", "exporter.url"),
        (OUT % "http://0.0.0.0:4318", "exporter.url"),
        (ALL % "0.0.0.0" + OUT % "http://LOCALHOST:4444", "exporter.url"),
        (ALL % "'::'" + OUT % "http://127.9.9.9:4444", "exporter.url"),
        (ALL % "'::1'" + OUT % "http://[0:0::1]:4444", "exporter.url"),
        (ALL % "10.0.0.5" + OUT % "http://10.0.0.5:4444", "exporter.url"),
        (ALL % "edge.example" + OUT % "http://Edge.Example:4444", "exporter.url"),
        ("exporters: {b: {type: remote_write, url: 'http://127.0.0.1:4318/api/v1/write'}}", "exporters.b.url"),
    ],
)
def test_a_destination_that_is_our_own_receiver_is_refused(text: str, key: str) -> None:
    (problem,) = problems(text)
    assert f": {key} must not be where receivers.http listens (receivers.http.listen " in problem


@pytest.mark.parametrize(
    "text",
    [
        OUT % "http://127.0.0.1:4418",
        OUT % "http://127.0.0.2:4318",
        OUT % "http://gateway.example:4318",
        ALL % "10.0.0.5" + OUT % "http://127.0.0.1:4444",
        "receivers: {http: {enabled: false}}\n" + OUT % "http://127.0.0.1:4318",
        "receivers: {http: {port: 0}}\n" + OUT % "http://127.0.0.1",
        "pipelines: {relay: false}\n" + OUT % "http://127.0.0.1:4318",
        RABBIT + "exporter: {type: amqp, url: 'amqp://localhost/', routing_key: other}",
        RABBIT + "exporter: {type: amqp, url: 'amqp://localhost/a', routing_key: q}",
        RABBIT + "exporter: {type: amqp, url: 'amqp://localhost/', exchange: e, routing_key: q}",
        "exporter: {type: amqp, url: 'amqp://localhost/', routing_key: penstock}",
    ],
)
def test_a_destination_that_may_be_somebody_else_is_not(text: str) -> None:
    assert of(text).config.exporter.type != "none"


@pytest.mark.parametrize("url", ["amqp://localhost", "amqp://127.0.0.1:5672/%2f", "amqp://you:hidden@localhost/%2F"])
def test_a_destination_that_is_the_queue_that_we_consume_is_refused(url: str) -> None:
    (problem,) = problems(RABBIT + f"exporter: {{type: amqp, url: '{url}', routing_key: q}}")
    assert "exporter.routing_key must not be the queue that receivers.amqp.queue consumes" in problem
    assert "secret" not in problem
    assert "hidden" not in problem


def test_a_problem_of_a_flag_or_a_variable_names_it() -> None:
    assert problems(flags={"--exporter-queue-workers": "many"}) == [
        "--exporter-queue-workers: exporter.queue.workers must be a whole number, got 'many'"
    ]
    assert problems(environ={"PENSTOCK_PROCESSES": "0"}) == ["PENSTOCK_PROCESSES: processes must be >= 1, got 0"]
    assert problems(flags={"--admin-lisen": "x"}) == ["--admin-lisen is not a setting; did you mean --admin-listen?"]


def test_a_key_without_effect_is_refused_by_name_in_all_three_ways() -> None:
    remedy = (
        "has no effect: one thread seals segments; for more throughput raise processes (exporter.queue has the key)"
    )
    assert problems(flags={"--segments-queue-workers": "3"}) == [f"--segments-queue-workers {remedy}"]
    variable = "PENSTOCK_SEGMENTS_QUEUE_PIPELINE_SPLIT_ENABLED"
    assert problems(environ={variable: "true"}) == [f"{variable} {remedy}"]

    ran = CliRunner().invoke(main, ["config", "check", "--segments-queue-adaptive-workers-enabled", "true"])
    assert ran.exit_code == 2
    assert "--segments-queue-adaptive-workers-enabled has no effect: one thread seals segments" in ran.output


def test_every_key_without_effect_on_segments_is_a_key_of_the_exporter() -> None:
    schema = schema_of(ServiceConfig)
    exporter, segments = schema.sections["exporter"].sections["queue"], schema.sections["segments"].sections["queue"]
    known = {*exporter.keys, *exporter.sections}
    assert set(segments.refused) == known - {*segments.keys, *segments.sections}


def test_a_key_that_the_destination_does_not_read_is_noted() -> None:
    config = of("exporters: {b: {type: console, url: 'http://h', exchange: e, queue: {workers: 2}}}").config
    assert list(config.notes()) == [
        "exporters.b.url has no effect on a destination of type console",
        "exporters.b.exchange has no effect on a destination of type console",
    ]
    assert list(of("exporter: {type: amqp, url: 'amqp://h', routing_key: q}").config.notes()) == []


def test_every_type_of_destination_and_every_receiver_can_be_made() -> None:
    assert set(get_args(ExporterType)) == {"none", *DESTINATIONS}
    assert [one.name for one in fields(ReceiversConfig)] == list(RECEIVERS)


def test_a_destination_reads_only_options_that_there_are() -> None:
    keys = {one.name for one in fields(ExporterSection)}
    assert all(kind.options - {"signal"} < keys for kind in DESTINATIONS.values())
    every = frozenset[str]().union(*(kind.options for kind in DESTINATIONS.values()))
    assert keys - {"type", "queue"} == every - {"signal"}


def test_a_variable_that_is_not_ours_is_mentioned_and_not_refused() -> None:
    (warning,) = of(environ={"PENSTOCK_SERVICE_HOST": "10.0.0.1", "HOME": "/"}).warnings
    assert warning.startswith("PENSTOCK_SERVICE_HOST is not a setting")


def test_named_destinations_can_be_set_in_all_three_ways() -> None:
    config = of(
        "exporters:\n  backup:\n    type: console\n",
        environ={"PENSTOCK_EXPORTERS_BACKUP_QUEUE_WORKERS": "3"},
        flags={"--exporters-backup-queue-max-bytes": "2Mi", "--exporters-other-type": "console"},
    ).config

    assert config.exporters["backup"].queue.workers == 3
    assert config.exporters["backup"].queue.max_bytes == 2**21
    assert list(config.relays()) == ["backup", "other"]
    assert config.queue_path("other") == Path("queue-other")


def test_two_queues_never_share_a_folder() -> None:
    text = "exporter: {type: console, queue: {path: ./q}}\nsegments:\n  queue: {path: q}\n"
    assert (
        "exporter.queue.path must be a folder of its own, got 'q', which segments.queue.path has" in problems(text)[0]
    )


def test_relative_paths_are_taken_from_the_data_folder() -> None:
    config = of("data_dir: /data\nexporter: {type: console}\ntables: {location: 'parquet:t'}").config

    assert config.queue_path("relay") == Path("/data/queue")
    assert config.tables_location == "parquet:/data/t"
    assert of("tables: {location: 'postgresql://db/x'}").config.tables_location == "postgresql://db/x"


def test_what_is_shown_can_be_loaded_again_and_is_the_same() -> None:
    text = (
        "exporter: {type: otlp_http, url: 'https://x', tls: {ca_file: /dev/null}, queue: {stale_flush: 1.5}}"
        "\nexporters: {b: {type: console, queue: {path: 'on: #'}}}\nspark: {conf: {spark.driver.memory: 2g}}"
    )
    loaded = of(text)

    assert config_as_yaml(of(config_as_yaml(loaded))) == config_as_yaml(loaded)
    assert config_as_yaml(of(config_as_yaml(loaded, with_origin=True))) == config_as_yaml(loaded)


def test_secrets_are_not_shown() -> None:
    text = (
        "exporter: {type: otlp_http, url: 'http://x', headers: {X-Key: hush}}\n"
        "tables: {location: 'postgresql://me:hush@db/x'}"
    )
    loaded = of(text)

    assert "hush" not in config_as_yaml(loaded)
    assert "postgresql://me:***@db/x" in config_as_yaml(loaded)


def test_the_file_that_init_writes_is_accepted_and_never_overwrites(tmp_path: Path) -> None:
    for arguments in ([], ["--full"]):
        file = tmp_path / f"penstock{len(arguments)}.yaml"
        ran = CliRunner().invoke(main, ["config", "init", "--out", str(file), *arguments])
        assert ran.exit_code == 0, ran.output
        assert CliRunner().invoke(main, ["config", "check", "-c", str(file)]).exit_code == 0
        again = CliRunner().invoke(main, ["config", "init", "--out", str(file), *arguments])
        assert again.exit_code == 2
        assert "exists" in again.output


def test_the_full_file_with_its_comment_marks_taken_away_gives_the_defaults() -> None:
    text = re.sub(r"(?m)^# ?", "", config_template(ServiceConfig)).replace("name: {}", "")
    text = text.split("\n\n", 1)[1]  # what introduces it

    assert config_as_yaml(of(text)) == config_as_yaml(of())


def test_every_key_is_explained() -> None:
    assert [key.name for key in KEYS if not key.doc and not key.choices] == []


def test_check_exits_with_2_and_says_which_line(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("processes: 0\n")
    ran = CliRunner().invoke(main, ["config", "check", "-c", str(file)])

    assert ran.exit_code == 2
    assert f"{file}:1: processes must be >= 1, got 0" in ran.output
    assert CliRunner().invoke(main, ["config", "check", "-c", str(tmp_path / "none.yaml")]).exit_code == 2


def test_check_names_the_file_that_it_found_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no file: fine, every key has its default" in CliRunner().invoke(main, ["config", "check"]).output
    (tmp_path / "penstock.yaml").write_text("processes: 1\n")
    assert "penstock.yaml: fine, keys set: 1 in the file;" in CliRunner().invoke(main, ["config", "check"]).output


def test_check_tells_keys_of_the_file_from_those_of_the_environment_and_of_flags(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("processes: 1\nexporters: {backup: {type: console}}\nadmin: {listen: 127.0.0.1:0}\n")
    ran = CliRunner(env={"PENSTOCK_PROCESSES": "2", "PENSTOCK_SPARK_ENABLED": "false"}).invoke(
        main, ["config", "check", "-c", str(file), "--shutdown-timeout", "5s"]
    )

    assert ran.stdout == (
        f"{file}: fine, keys set: 2 in the file, 2 by the environment (PENSTOCK_PROCESSES, PENSTOCK_SPARK_ENABLED), "
        "1 by flags (--shutdown-timeout); the others have their defaults\n"
    )


def test_a_variable_that_is_like_none_of_ours_is_not_taken_for_one() -> None:
    (far,) = of(environ={"PENSTOCK_FOO": "1"}).warnings
    (near,) = of(environ={"PENSTOCK_PROCESES": "1"}).warnings

    assert "did you mean" not in far
    assert near.endswith("did you mean PENSTOCK_PROCESSES?")


def test_check_reads_the_metric_definitions_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.yaml").write_text("metrics: [{name: x, source: y, levels: [week]}]")
    for name, code in (("metrics.yaml", 2), ("elsewhere.yaml", 0)):
        ran = CliRunner().invoke(main, ["config", "check", "--data-dir", str(tmp_path), "--definitions", name])
        assert ran.exit_code == code, ran.output
        assert ("minute, hour, day is expected" if code else "not here") in ran.output


def test_relative_definitions_are_found_beside_the_file_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "metrics.yaml").write_text("metrics: [{name: x, source: y, levels: [week]}]")
    file = tmp_path / "etc" / "penstock.yaml"
    file.write_text("data_dir: /var/lib/penstock\ndefinitions: metrics.yaml\n")
    monkeypatch.chdir(tmp_path)

    ran = CliRunner().invoke(main, ["config", "check", "-c", "etc/penstock.yaml"])

    assert ran.exit_code == 2
    assert f"{tmp_path}/etc/metrics.yaml: metrics[0] (x).levels" in ran.output
    assert load(ServiceConfig, file).config.definitions_path == tmp_path / "etc" / "metrics.yaml"
    by_flag = load(ServiceConfig, file, flags={"--definitions": "metrics.yaml"}).config
    assert by_flag.definitions_path == Path("/var/lib/penstock/metrics.yaml")


def test_check_notes_what_is_allowed_and_deserves_a_look(tmp_path: Path) -> None:
    flags = ["--exporter-type", "console", "--queue-durability", "memory", "--queue-full-behavior", "drop_oldest"]
    assert "exporter.type is none" in CliRunner().invoke(main, ["config", "check", "--exporter-url", "http://h"]).output
    flags += ["--receivers-http-auth-token-file", str(tmp_path / "none")]
    ran = CliRunner().invoke(main, ["config", "check", *flags])

    assert ran.exit_code == 0
    for note in ("durability is memory", "drop_oldest", "auth.token_file"):
        assert note in ran.output, note


@pytest.mark.parametrize("how", ["- *{before}", "<<: *{before}"])
def test_aliases_that_explode_are_refused_at_once(tmp_path: Path, how: str) -> None:
    lines = ["a0: &a0 [x, x]" if how.startswith("-") else "a0: &a0 {x: 1}"]
    for level in range(1, 40):
        part = how.format(before=f"a{level - 1}")
        lines += (
            [f"a{level}: &a{level}", f"  {part}", f"  {part}"]
            if how.startswith("-")
            else [f"a{level}: &a{level}", f"  <<: [*a{level - 1}, *a{level - 1}]"]
        )
    text = "\n".join(lines)
    with pytest.raises(ConfigError, match="with its aliases it has more than 100000 values"):
        parse_config_document(text, "bomb.yaml")
    (tmp_path / "definitions.yaml").write_text(text)
    with pytest.raises(ConfigError, match="with its aliases it has more than 100000 values"):
        load_definitions(tmp_path / "definitions.yaml")


def test_a_folder_is_a_path_or_a_file_uri_and_no_bucket_becomes_a_folder_of_that_name() -> None:
    given = load(ServiceConfig, text="segments: {location: 'file:///data/segments'}").config
    assert given.resolved(given.segments.location) == Path("/data/segments")
    for text in ("segments: {location: 's3://bucket/segments'}", "tables: {location: 's3://bucket/tables'}"):
        with pytest.raises(ConfigError, match="must be a path or a file:// URI, got 's3://bucket/"):
            load(ServiceConfig, text=text)


@pytest.mark.parametrize("text", ["exporter: {headers: 'X-Key: s3cret'}", "spark: {conf: [s3cret]}"])
def test_what_stands_where_secrets_belong_is_not_quoted(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(ServiceConfig, text=text)
    assert "s3cret" not in str(raised.value)


def test_secrets_of_spark_are_masked_by_their_names() -> None:
    text = "spark: {conf: {spark.hadoop.fs.s3a.secret.key: s3cret, spark.driver.memory: 2g}}"
    shown = config_as_yaml(load(ServiceConfig, text=text))
    assert "s3cret" not in shown
    assert "2g" in shown


def test_old_spellings_are_taken_with_a_warning() -> None:
    text = "receivers: {http: {host: 127.0.0.1, port: 5000}}\nsegments: {path: ./old}"
    loaded = of(text)
    assert loaded.config.receivers.http.listen == "127.0.0.1:5000"
    assert str(loaded.config.segments.location) == "./old"
    assert loaded.warnings == (
        "configuration:1: receivers.http.host is an old spelling, write receivers.http.listen: HOST:PORT in one.",
        "configuration:1: receivers.http.port is an old spelling, write receivers.http.listen: HOST:PORT in one.",
        "configuration:2: segments.path is an old spelling, write segments.location: the same folder.",
    )
    assert " port:" not in config_as_yaml(loaded)


def test_of_an_old_spelling_and_a_new_one_the_later_origin_wins() -> None:
    text = "receivers: {http: {port: 5000}, grpc: {listen: '127.0.0.1:6000'}}"
    flags = {"--receivers-http-listen": "[::1]:7000", "--receivers-grpc-port": "8000"}
    receivers = of(text, flags=flags).config.receivers
    assert (receivers.http.listen, receivers.grpc.listen) == ("[::1]:7000", "127.0.0.1:8000")
