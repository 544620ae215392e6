"""RabbitMQ streams as a source of Spark: `format("penstock-amqp")`.

source ─► options       what the user says, checked
  └─► readers           ranges of offsets: planned by the driver, read by tasks into Arrow rows
        └─► client      a stream as a log: earliest, latest, a range, what is missing from it
              └─► link  one connection, driven by the thread that waits for it
"""
