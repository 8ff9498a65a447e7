"""`pdrt top`: a cluster in a terminal."""
