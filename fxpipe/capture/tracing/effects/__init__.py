"""What each op of a traced graph does besides its result: which memory it writes, and whether it is random."""
