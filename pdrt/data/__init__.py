"""How KV blocks move: transfers, metadata slots, transports, peers."""
