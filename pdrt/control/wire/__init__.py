"""HTTP/1.1 as the router speaks it: a server, a client, and nothing between them and asyncio."""
