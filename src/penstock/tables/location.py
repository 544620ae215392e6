"""Folders by path or by URI: segments and tables lie on file systems that are mounted here."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from penstock.errors import ConfigError


def local_tables_folder(location: str | os.PathLike[str], field: str) -> Path:
    """The folder of a path or a `file://` URI.

    ConfigError for any other scheme: taken for a path, `s3://bucket` would become a folder `s3:` on this machine.
    """
    text = os.fspath(location)
    if "://" not in text:
        return Path(text)
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    raise ConfigError(
        f"must be a path or a file:// URI, got {text!r}: object stores and HDFS have to be mounted, on the driver and "
        "the executors under the same path",
        field=field,
    )
