"""Metric definitions: read from the configured file, and kept current over reloads."""

from penstock.config.tree import ServiceConfig
from penstock.errors import ConfigError
from penstock.model.definition import Definitions
from penstock.model.definition_file import load_definitions
from penstock.model.level import Level


def read_service_definitions(config: ServiceConfig) -> Definitions:
    """Read the definitions file; ConfigError names the mistake in it."""
    if config.definitions_path is None:
        return Definitions()
    try:
        return load_definitions(config.definitions_path)
    except ConfigError as error:
        raise ConfigError(f"definitions {error}") from error


class CurrentDefinitions:
    """The current definitions, for threads that read them with every batch; a reload replaces them.

    Threads: every method may be called from any thread.
    """

    def __init__(self, definitions: Definitions) -> None:
        self.not_at: dict[Level, tuple[str, ...]] = {}
        self.take(definitions)

    def take(self, definitions: Definitions) -> None:
        self.definitions = definitions
        self.not_at.update({level: definitions.not_at(level) for level in Level})
