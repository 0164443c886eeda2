"""Plan, Schedule and Profile -> Timeline, without running. No torch."""
