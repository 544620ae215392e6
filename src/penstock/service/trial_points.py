"""Points for a trial of definitions: recorded requests, segments of a service, or what is sent while it listens."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from penstock.clock import SystemClock
from penstock.decode.config import IntakeConfig
from penstock.decode.decoder import Decoder
from penstock.decode.outcome import Format
from penstock.errors import PenstockError
from penstock.model.chunk_partials import KEPT
from penstock.model.point import PointKind
from penstock.model.segment import read_segment, sealed
from penstock.receive.config import HttpReceiverConfig
from penstock.receive.http_receiver import HttpReceiver
from penstock.receive.intake import Intake
from penstock.service.definition_trial import DefinitionTrial

# The kind of a metric that is kept by its own labels, by its function.
_KIND_OF = {str(functions[0]): kind for kind, functions in KEPT.items() if kind is not PointKind.EVENT}


def try_on_requests(trial: DefinitionTrial, paths: list[Path], intake: IntakeConfig) -> None:
    """Bodies in files: OTLP as protobuf, OTLP JSON or events; JSON also one request a line.

    The first value of a cumulative stream is counted: a recording has no value before it.
    """
    decoder = Decoder(intake, SystemClock(), began=0.0)
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise PenstockError(f"{path}: {error.strerror}: name a file with recorded requests") from error
        for kind, body in _bodies(content):
            decoded = decoder.decode(kind, [body])
            if 0 in decoded.outcomes.errors:
                raise PenstockError(f"{path}: not read as {kind.value}: {decoded.outcomes.errors[0].message}")
            trial.submit(decoded.chunks, lambda error: None)


def _bodies(content: bytes) -> list[tuple[Format, bytes]]:
    if content.lstrip()[:1] not in (b"{", b"["):
        return [(Format.OTLP, content)]
    try:
        json.loads(content)
        bodies = [content]
    except ValueError:
        bodies = [line for line in content.splitlines() if line.strip()]
    return [(Format.OTLP_JSON if b'"resourceMetrics"' in body else Format.EVENTS, body) for body in bodies]


def try_on_segments(trial: DefinitionTrial, folder: Path, oldest: float) -> None:
    """What a service has sealed since `oldest` (seconds since the epoch), of metrics that are kept by own labels."""
    try:
        found = [folder / segment.name for segment in sealed(folder)]
        recent = [path for path in found if path.stat().st_mtime >= oldest]
    except OSError as error:
        raise PenstockError(
            f"{folder}: {error.strerror}: name the folder of sealed segments with --segments"
        ) from error
    for path in recent:
        partials = read_segment(path)
        for function, kind in _KIND_OF.items():
            rows = partials.filter(pc.equal(partials["function"], pa.scalar(function)))
            for metric in pc.unique(rows["metric"]).to_pylist():
                own = rows.filter(pc.equal(rows["metric"], pa.scalar(metric)))
                trial.take(metric, kind, _points(own, function))


def _points(partials: pa.Table, function: str) -> pa.Table:
    """Partials as points: each stands for `count` values; of a counter it is what was counted."""
    total = partials["sum"]
    mean = pc.divide(total, pc.cast(pc.max_element_wise(partials["count"], 1), pa.float64()))
    columns = {"entity": partials["entity"], "time": partials["bucket"], "value": total if function == "sum" else mean}
    return pa.table({**columns, **{name: partials[name] for name in ("count", "sum", "min", "max")}})


def try_on_live_points(
    trial: DefinitionTrial,
    host: str,
    port: int,
    seconds: float,
    intake: IntakeConfig,
    on_listening: Callable[[int], None],
) -> None:
    """What senders send over HTTP within `seconds`. It is answered, and goes nowhere."""
    stage = Intake(trial, None, intake).start()
    receiver = HttpReceiver(HttpReceiverConfig(host=host, port=port), stage)
    try:
        on_listening(receiver.start().port)
        threading.Event().wait(seconds)
    finally:
        receiver.stop_accepting()
        stage.close(5.0)
        receiver.close(5.0)
