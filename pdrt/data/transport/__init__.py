"""Ways to move KV from a prefill rank's memory into a decode rank's."""
