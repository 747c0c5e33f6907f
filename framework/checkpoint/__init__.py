"""State on disk in the coordinates of whole tensors: shards, writing, reading, retention. Knows no engine and no model."""
