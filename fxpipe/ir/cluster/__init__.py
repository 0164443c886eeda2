"""What there is to run on: devices, servers and links."""
