"""Who runs next: pure schedulers, block accounting, admission."""
