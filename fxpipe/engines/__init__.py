"""What drives generated stages: a worker per device, or a process per rank."""
