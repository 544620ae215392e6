"""Requests from web pages: a browser names the page's site in `Origin`, and other clients send no such header."""

from collections.abc import Mapping, Sequence

_TAKEN_HEADERS = "authorization, content-type, content-encoding, idempotency-key"
_REMEMBERED = 7200  # seconds for which a browser need not ask again


class AllowedRequestOrigins:
    """The sites whose pages may send: `https://shop.example`, or `*` for all."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = {origin.rstrip("/").lower() for origin in allowed}

    def is_refused(self, origin: str | None) -> bool:
        """Says whether a request comes from the page of another site. Without a header it comes from no page."""
        return origin is not None and "*" not in self._allowed and origin.lower() not in self._allowed

    def headers(self, origin: str | None, *, is_preflight: bool = False) -> Mapping[str, str]:
        """Returns what the answer to an allowed page says, so that its browser hands the answer on."""
        if origin is None:
            return {}
        headers = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        if is_preflight:
            headers["Access-Control-Allow-Methods"] = "POST"
            headers["Access-Control-Allow-Headers"] = _TAKEN_HEADERS
            headers["Access-Control-Max-Age"] = str(_REMEMBERED)
        return headers
