"""From a captured graph to generated files that run: plan, program, schedule, timeline, files."""
