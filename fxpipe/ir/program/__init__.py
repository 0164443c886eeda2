"""What each stage and each device runs, takes and sends."""
