"""The metric definitions that the configuration names, and those that hold while a process runs."""

from penstock.config.tree import ServiceConfig
from penstock.errors import ConfigError
from penstock.model.definition import Definitions
from penstock.model.definition_file import load_definitions
from penstock.model.level import Level


def read_definitions(config: ServiceConfig) -> Definitions:
    """As the file says now; ConfigError names the mistake in it."""
    if config.definitions is None:
        return Definitions()
    try:
        return load_definitions(config.resolved(config.definitions))
    except ConfigError as error:
        raise ConfigError(f"definitions {error}") from error


class CurrentDefinitions:
    """The definitions that hold, for threads that ask again with every batch: a reload changes the answer.

    Threads: every method may be called from any thread.
    """

    def __init__(self, definitions: Definitions) -> None:
        self.not_at: dict[Level, tuple[str, ...]] = {}
        self.take(definitions)

    def take(self, definitions: Definitions) -> None:
        self.definitions = definitions
        self.not_at.update({level: definitions.not_at(level) for level in Level})
