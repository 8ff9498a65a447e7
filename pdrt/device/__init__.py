"""What a device does with a batch: models, paged KV, sampling."""
