"""What an exit code of the service, or of one of its processes, says. 0 is good order, 1 a failure, 2 the settings."""

FINAL = 3  # of a process: a restart would fail again, an operator has to act first
LATE = 4  # not everything was done in time; what is durable stays
INTERRUPTED = 130  # as shells say of SIGINT
