"""The configuration reference, made from the configuration classes.

python -m penstock.config.reference > docs/reference/configuration.md
"""

import sys

from penstock.config.schema import ConfigKey, ConfigSection, schema_of
from penstock.config.show import config_value_as_yaml
from penstock.config.tree import ServiceConfig

INTRODUCTION = """\
# Configuration

<!-- Made by `python -m penstock.config.reference`; change the classes in src/penstock/config, not this. -->

`penstock run -c penstock.yaml` reads one YAML file. Every key in it is also an environment variable and a flag:

| | `admin.listen` | in general |
|---|---|---|
| file | `admin: {listen: 127.0.0.1:9109}` | sections nest |
| environment | `PENSTOCK_ADMIN_LISTEN=127.0.0.1:9109` | `PENSTOCK_` and the key in capitals, `_` for `.` |
| flag | `--admin-listen 127.0.0.1:9109` | `--` and the key, `-` for `.` and `_` |

**A flag wins over the environment, the environment over the file, the file over the default**, key by key. Keys of \
`exporter.queue` have the short flags that the queue's users know, too: `--queue-max-bytes` is \
`--exporter-queue-max-bytes`. In a named section the name takes its place: `exporters.backup.url` is \
`--exporters-backup-url` and `PENSTOCK_EXPORTERS_BACKUP_URL`. Lists are written `a,b`, mappings `key=value,key=value`.

Sizes: `1048576`, `512Mi`, `1Gi`, `10MB`. Durations: `0.5` (seconds), `250ms`, `30s`, `1m30s`, `7d`. Relative paths \
are taken from `data_dir`; `definitions` of a file from the folder of that file.

| command | does |
|---|---|
| `penstock config init` | prints a file to begin with; `--full`: with every key |
| `penstock config check -c FILE` | names every problem: key, value, bound, line; exit code 2 if there is one |
| `penstock config show -c FILE --origin` | what holds, and whether file, environment, flag or default said so |
| `penstock config keys [TEXT]` | every key with default, flag and environment variable |

```console
$ penstock config check -c penstock.yaml
Error: penstock.yaml:6: exporter.queue.max_byts is not a setting; did you mean max_bytes?
penstock.yaml:9: exporter.queue.circuit_breaker.threshold must be a whole number >= 1, got 0
```

SIGHUP reads the file again. What can change while the service runs is marked ↻ (of certificates and secrets what is \
in the file, not its name); of the rest the log says that it needs a restart. An unknown environment variable that \
begins with `PENSTOCK_` is reported and not refused.

Ready-made files: [one machine](../../examples/penstock-single.yaml), [edge](../../examples/penstock-edge.yaml), \
[cluster](../../examples/penstock-cluster.yaml).
"""
RELOADED = (
    "logging.level",
    "logging.format",
    "definitions",
    "token_file",
    "password_file",
)


def render_config_reference() -> str:
    """The whole document."""
    schema = schema_of(ServiceConfig)
    out = [INTRODUCTION, "## At the top\n", *_table(list(schema.keys.values())), ""]
    for section in schema.sections.values():
        out += _section(section, 2)
    return "\n".join(out).rstrip() + "\n"


def _section(section: ConfigSection, depth: int) -> list[str]:
    name = ".".join(section.path)
    out = [f"{'#' * min(depth, 4)} `{name}`\n", section.doc.split("\n\n")[0].replace("\n", " "), ""]
    if section.is_named:
        return [*out, f"Each has the keys of `{section.path[0].removesuffix('s')}`.", ""]
    if section.keys:
        out += [*_table(list(section.keys.values())), ""]
    for inner in section.sections.values():
        out += _section(inner, depth + 1)
    return out


def _table(keys: list[ConfigKey]) -> list[str]:
    out = ["| key | default | |", "|---|---|---|"]
    for key in keys:
        default = config_value_as_yaml(key, key.default)
        text = key.doc
        if key.choices and not all(choice in text for choice in key.choices):
            text = f"{text} One of {', '.join(f'`{choice}`' for choice in key.choices)}.".strip()
        if key.short_flag:
            text = f"{text} `{key.short_flag}`".strip()
        mark = " ↻" if key.name.endswith(RELOADED) or _is_certificate_of_receiver(key) else ""
        out.append(f"| `{key.path[-1]}`{mark} | {f'`{default}`' if default else 'must be set'} | {text} |")
    return out


def _is_certificate_of_receiver(key: ConfigKey) -> bool:
    return key.path[0] == "receivers" and key.path[-2] == "tls"


if __name__ == "__main__":
    sys.stdout.write(render_config_reference())
