"""The settings of the RabbitMQ receiver; what it does with messages is tested with the handlers and end to end."""

from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.receive.rabbitmq_config import RabbitReceiverConfig


@pytest.mark.parametrize(
    "settings", [{"url": "http://x"}, {"queue": ""}, {"workers": 0}, {"batch_size": 0}, {"batch_timeout": 0.0}]
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        RabbitReceiverConfig(**settings)
