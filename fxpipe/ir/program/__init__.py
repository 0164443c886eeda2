"""Programs: what each stage and each device runs, takes and sends."""
