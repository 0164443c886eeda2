"""The public entry points: one file for each public function, and the command line."""
