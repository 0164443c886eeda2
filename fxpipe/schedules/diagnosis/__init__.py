"""Where the time of a step goes: from a timeline to what each device spends its time on. Without torch."""
