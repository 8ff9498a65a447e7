"""What leaders and the router do: HTTP, bootstrap, routing, dispatch, heartbeat."""
