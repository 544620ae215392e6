"""Bearer tokens, compared in constant time."""

import hmac
from collections.abc import Sequence


def is_authorized(headers: Sequence[str], tokens: Sequence[bytes]) -> bool:
    """Whether there is one `Authorization` header and it holds one of the tokens."""
    scheme, _, token = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
    given = token.strip().encode("utf-8", "replace")
    # Every token is compared, so that the time it takes does not tell which one came close.
    matches = [hmac.compare_digest(given, known) for known in tokens]
    return scheme.lower() == "bearer" and any(matches)
