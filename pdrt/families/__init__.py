"""From a model's config.json to its spec: one parse function a family, named in `registry`."""
