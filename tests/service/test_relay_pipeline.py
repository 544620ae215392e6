"""What a destination in the configuration file becomes: an exporter that has all that the file says."""

from pathlib import Path

from penstock.config.load import load
from penstock.config.tree import ServiceConfig
from penstock.export.exporters.amqp_exporter import AmqpConfig, AmqpExporter
from penstock.export.exporters.remote_write_exporter import RemoteWriteExporter
from penstock.export.http_client import TlsConfig
from penstock.service.relay_pipeline import make_stage_exporter


def test_a_broker_is_reached_with_the_password_the_exchange_and_the_certificates_of_the_file(tmp_path: Path) -> None:
    password, authorities = tmp_path / "password", tmp_path / "ca.pem"
    password.write_text("s3cret")
    authorities.touch()
    text = (
        "exporter: {type: amqp, url: 'amqps://relay@broker.example/telemetry', exchange: metrics, routing_key: raw,\n"
        f"  token_file: {password}, tls: {{ca_file: {authorities}}}}}"
    )
    exporter = make_stage_exporter(load(ServiceConfig, text=text).config.exporter)
    assert isinstance(exporter, AmqpExporter)
    assert exporter._config == AmqpConfig(
        url="amqps://relay@broker.example/telemetry",
        exchange="metrics",
        routing_key="raw",
        password_file=str(password),
        tls=TlsConfig(ca_file=str(authorities)),
    )


def test_order_and_timeout_of_the_file_reach_the_destination() -> None:
    text = "exporter: {type: remote_write, url: 'http://127.0.0.1:9090/api/v1/write', in_order: false, timeout: 3s}"
    config = load(ServiceConfig, text=text).config.exporter
    exporter = make_stage_exporter(config)
    assert isinstance(exporter, RemoteWriteExporter)
    assert exporter.in_order is False
    assert exporter._client._config.timeout == 3.0
