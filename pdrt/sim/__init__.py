"""A cluster on a virtual clock: real policies and schedulers, and a model of what takes time."""
