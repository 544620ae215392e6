"""The settings of the RabbitMQ receiver; what it does with messages is tested with the handlers and end to end."""

from typing import Any

import pytest

from penstock.config.load import load
from penstock.config.tree import ServiceConfig
from penstock.errors import ConfigError
from penstock.receive.config import BrokerTlsConfig, RabbitReceiverConfig


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "http://x"},
        {"queue": ""},
        {"queue": ()},
        {"queue": ("a", "a")},
        {"workers": -1},
        {"prefetch_count": 1001},
        {"batch_size": 0},
        {"batch_timeout": 0.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        RabbitReceiverConfig(**settings)


def test_a_key_without_its_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tls.key_file is set, but tls.cert_file is not"):
        BrokerTlsConfig(key_file="key.pem")


@pytest.mark.parametrize(
    "section", ["receivers: {amqp: {enabled: true, %s}}", "exporter: {type: amqp, routing_key: q, %s}"]
)
def test_certificates_need_an_address_with_tls(section: str) -> None:
    with pytest.raises(ConfigError, match=r"url must begin with amqps:// where tls is set"):
        load(ServiceConfig, text=section % "url: 'amqp://host/', tls: {ca_file: /dev/null}")


def test_certificates_that_are_not_there_are_noted() -> None:
    text = "receivers: {amqp: {enabled: true, url: 'amqps://host/', tls: {ca_file: /nowhere/ca.pem}}}"
    (note,) = load(ServiceConfig, text=text).config.notes()
    assert note == "receivers.amqp.tls.ca_file must be a file that we can read, got '/nowhere/ca.pem'"


@pytest.mark.parametrize("key", ["auto_ack: true", "execution: process", "max_attempts: 3"])
def test_what_the_consumer_pool_takes_and_a_receiver_does_not_says_why(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"receivers.amqp.{key.split(':')[0]} has no effect here: \w+"):
        load(ServiceConfig, text=f"receivers: {{amqp: {{{key}}}}}")
