"""How a value moves: mailboxes between threads, shared memory between processes."""
