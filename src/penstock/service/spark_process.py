"""The Spark job as a process of its own, so that a Java that dies takes no receiver with it.

`python -m penstock.service.spark_process DESCRIPTOR`, started by the service only; `child_channel` has the protocol.
"""

import logging
import os
import signal
import sys
import threading
from typing import Any

from penstock.config.load import load
from penstock.config.tree import ServiceConfig
from penstock.errors import PenstockError
from penstock.service.child_channel import ChildAnswers
from penstock.service.current_definitions import CurrentDefinitions, read_service_definitions
from penstock.service.exit_codes import FINAL
from penstock.service.logs import set_up_logs
from penstock.service.signals import call_on_signals
from penstock.service.standard_error import process_stderr_to
from penstock.tables.maintenance import Maintenance
from penstock.telemetry import Telemetry

log = logging.getLogger("penstock.service.spark_process")  # by name: as a program it is called __main__
JAVA_LOG = "spark.log"
_UMASKS = {"owner": 0o077, "group": 0o027, "all": 0o022}  # the tables are made with


def main(descriptor: int) -> int:
    """Run until a stop is requested; the exit code says whether a restart may help."""
    stopping, working = threading.Event(), threading.Event()

    def stop() -> None:
        stopping.set()
        if not working.is_set():
            os._exit(0)  # nothing is under way yet, and Spark takes its time to start; its Java ends with us

    answerer = ChildAnswers(descriptor, stop)
    call_on_signals(lambda _: stop(), signal.SIGTERM, signal.SIGINT)
    config = load(ServiceConfig, text=answerer.first()["config"]).config
    set_up_logs(config.logging.number, config.logging.format)
    telemetry = Telemetry()

    def reload(message: dict[str, Any]) -> str:
        fresh = load(ServiceConfig, text=message["config"]).config
        set_up_logs(fresh.logging.number, fresh.logging.format)
        defined.take(read_service_definitions(fresh))
        return ""

    try:
        defined = CurrentDefinitions(read_service_definitions(config))
        answerer.start({"values": lambda _: list(telemetry.values()), "reload": reload})
        _run(config, defined, telemetry, stopping, working)
    except PenstockError as error:
        log.error("The Spark job cannot go on. reason=%s", error)
        return FINAL
    except Exception:
        log.exception("The Spark job failed; Java's own words are in its log. java_log=%s", config.resolved(JAVA_LOG))
        return 1
    return 0


def _run(
    config: ServiceConfig,
    defined: CurrentDefinitions,
    telemetry: Telemetry,
    stopping: threading.Event,
    working: threading.Event,
) -> None:
    from penstock.spark.fold_tasks import run_folds_on_spark
    from penstock.spark.session import spark_page_settings, start_session
    from penstock.spark.supervisor import JobSupervisor
    from penstock.tables.port import open_tables

    java_log = config.resolved(JAVA_LOG)
    java_log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    java_log.touch(mode=0o600)
    os.umask(_UMASKS[config.tables.readable_by])  # Spark's own files are in the segments' folder, which is private
    log.info("Spark starts. master=%s java_log=%s", config.spark.master, java_log)
    with process_stderr_to(java_log):
        shown = spark_page_settings(config.spark.master, ui=config.spark.ui, event_log=config.spark.event_log)
        session = start_session(config.spark.master, {**shown, **config.spark.conf})
    tables = open_tables(config.tables_location)
    if session.sparkContext.uiWebUrl:
        log.info("Spark's own page is open. url=%s", session.sparkContext.uiWebUrl)
    supervisor = JobSupervisor(session, tables, spark_process_job_config(config, defined))
    telemetry.watch(supervisor.samples)
    maintenance = Maintenance(
        tables,
        float(config.tables.maintain_every),
        spark_process_lifetimes(config),
        lambda: defined.definitions,
        fold_every=float(config.tables.fold_every),
        run=run_folds_on_spark(session),
    )
    telemetry.watch(maintenance.samples)

    def stop_when_asked() -> None:
        stopping.wait()
        maintenance.stop()
        supervisor.stop()

    threading.Thread(target=stop_when_asked, name="penstock-spark-ending", daemon=True).start()
    working.set()
    log.info("Spark works. tables=%s", tables.location)
    maintenance.start()
    try:
        supervisor.run()
    finally:
        session.stop()


def spark_process_job_config(config: ServiceConfig, defined: CurrentDefinitions) -> Any:
    from penstock.spark.job import JobConfig

    spark, segments = config.spark, config.resolved(config.segments.location).absolute()
    return JobConfig(
        segments=segments,
        checkpoint=spark.checkpoint or (segments / ".checkpoint").as_uri(),
        trigger=f"{int(float(spark.trigger) * 1000)} milliseconds",
        max_files=spark.max_files,
        max_rows=spark.max_rows,
        max_bytes=None if spark.max_bytes is None else int(spark.max_bytes),
        retain_segments=None if spark.keep_segments is None else float(spark.keep_segments),
        not_at=defined.not_at,
    )


def spark_process_lifetimes(config: ServiceConfig) -> dict[str, float]:
    keep = config.tables.keep
    ages = {"minute": keep.minute, "hour": keep.hour, "day": keep.day, "top_n": keep.top_n}
    return {table: float(age) for table, age in ages.items()}


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    logging.shutdown()
    os._exit(code)  # Java's threads must not keep a process that is done
