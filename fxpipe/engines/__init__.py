"""The engines, which run generated stages: a worker thread per device, or a process per rank."""
