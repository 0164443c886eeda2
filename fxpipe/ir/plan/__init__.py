"""Which ops form which stage, and what that decision is made from."""
