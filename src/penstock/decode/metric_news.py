"""What senders say of their metrics, as far as it is news: nothing is done for a point, and little for a metric."""

from penstock.model.metric_description import LONGEST_UNIT, Descriptions, MetricDescription, text_of

_MOST = 100_000  # metrics that are remembered; beyond that all are forgotten, and news again


class MetricNews:
    """Units, descriptions and types that differ from what was said before.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[bytes, bytes]] = {}
        self._news: dict[str, MetricDescription] = {}

    def note(self, name: bytes, unit: bytes, description: bytes) -> bool:
        """Takes what was said of a metric as its sender has written it; says whether it is news."""
        said = unit, description
        if not (unit or description) or self._known.get(name) == said:
            return False
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[name] = said
        self.add(text_of(name), MetricDescription("", text_of(unit, LONGEST_UNIT), text_of(description)))
        return True

    def add(self, metric: str, description: MetricDescription) -> None:
        if len(self._news) < _MOST or metric in self._news:
            before = self._news.get(metric, MetricDescription())
            self._news[metric] = before.updated_by(description)

    def take(self) -> Descriptions:
        """Returns what was not taken before."""
        news, self._news = self._news, {}
        return news
