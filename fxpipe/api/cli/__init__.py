"""The command `fxpipe`: one file for each group of subcommands."""
