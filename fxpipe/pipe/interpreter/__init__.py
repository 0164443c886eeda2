"""What the whole process has once: its forks, and its collector of garbage."""
