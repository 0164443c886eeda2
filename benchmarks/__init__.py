"""What fxpipe costs and gains, measured: each script prints one table."""
