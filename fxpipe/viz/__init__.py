"""Timeline, Schedule and Program -> text, SVG and traces."""
