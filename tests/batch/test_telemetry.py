"""Every metric of the queue is declared, with labels that fit."""

from penstock import PartitionPolicy, ThreadPolicy
from penstock.telemetry import DECLARATIONS, Telemetry, declared
from tests.batch.support import A, B, Recorder, open_queue, settle


def test_every_sample_is_declared_and_every_declaration_has_samples() -> None:
    with open_queue(threads=ThreadPolicy.fixed(2), partitions=PartitionPolicy.adaptive()) as queue:
        queue.add_handler(A, Recorder())
        queue.produce(A())
        queue.produce(B())
        settle(queue)
        samples = list(queue.stats().samples())

    for sample in samples:
        assert len(sample.labels) == len(declared(sample.name).labels)
    ours = {name for name in DECLARATIONS if name.startswith("penstock_batch_queue_")}
    assert {sample.name for sample in samples} == ours
    telemetry = Telemetry()
    telemetry.watch(queue.stats().samples)
    assert b'penstock_batch_queue_unregistered_total{queue="test",type="B"} 1.0' in telemetry.render()
