"""A whole cluster on this machine, under one command."""
